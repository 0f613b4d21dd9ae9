"""Memory is poisoned in every test, so that a value that nobody wrote is a NaN and not a lucky zero."""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]
