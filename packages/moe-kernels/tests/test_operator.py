"""Launchers as operators: on which device they launch."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from moe_kernels.triton_kernels.operator import on_device_of_tensors


class OnDevice(Tensor):
    """As a tensor on a CUDA device, which need not be there."""

    def __new__(cls, index: int) -> "OnDevice":
        found = torch.zeros(2).as_subclass(cls)
        found.index = index
        return found

    index: int

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current device, which is the last of the list; the first is 0."""
    stack = [0]

    @contextmanager
    def device(which: torch.device) -> Any:
        stack.append(which.index)
        yield
        stack.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: stack[-1])
    monkeypatch.setattr(torch.cuda, "device", device)
    return stack


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((OnDevice(1), 3.0), 1),
        ((None, OnDevice(2), OnDevice(1)), 2),
        ((OnDevice(0),), 0),
        ((torch.zeros(2), OnDevice(1)), 0),
        ((5, "x"), 0),
    ],
    ids=["another", "the first tensor counts", "the current one", "a CPU", "no tensor"],
)
def test_a_launch_is_made_on_the_device_of_its_first_tensor(
    arguments: tuple[Any, ...], expected: int, current: list[int]
) -> None:
    seen = []

    def launch(*found: Any) -> str:
        assert all(one is other for one, other in zip(found, arguments, strict=True))
        seen.append(current[-1])
        return "result"

    assert on_device_of_tensors(launch)(*arguments) == "result"
    assert seen == [expected]
    assert current == [0]
