"""Fixtures of this package. Every test runs in poisoned memory (case R130); a third party's package is importable."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Before Triton is imported: without a GPU its kernels run in the interpreter, on CPU tensors.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from moe_kernels import implementation as choice, passes
from moe_kernels.testing import poisoned_memory

sys.path.insert(0, str(Path(__file__).parent / "third_party" / "src"))


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.fixture(params=["one pass", "many passes"])
def pass_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pointwise mathematics over all rows at once, and over a few at a time."""
    if request.param == "many passes":
        monkeypatch.setattr(passes, "_ELEMENTS", 50)


@pytest.fixture(params=["plain", "triton"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every implementation in turn; Triton's on the GPU where there is one, else interpreted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if request.param == "triton" and (reason := choice.triton_unavailable(device)):
        pytest.skip(reason)
    with choice.implementation(request.param):
        yield request.param
