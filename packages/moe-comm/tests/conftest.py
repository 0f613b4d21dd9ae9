"""Poisoned memory in every test, and a third party's package on the import path."""

import sys
from pathlib import Path

import pytest
import torch

THIRD_PARTY = Path(__file__).parent / "third_party"

sys.path.insert(0, str(THIRD_PARTY / "src"))


@pytest.fixture(autouse=True)
def poisoned_memory():
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
