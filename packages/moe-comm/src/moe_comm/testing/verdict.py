"""How the kit judges: whole-sentence failures that survive `python -O`, and memory that is poisoned meanwhile."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from moe_comm.errors import MoeCommError


def require(holds: bool, message: str) -> None:
    """Fail with the message unless the condition holds."""
    if not holds:
        raise AssertionError(message)


def same(got: Tensor, want: Tensor, what: str) -> None:
    """Fail unless dtype, shape and every bit agree (0 and -0 are the same, NaN is never right)."""
    require(got.dtype == want.dtype, f"{what}: {got.dtype}, expected {want.dtype}")
    require(got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    require(torch.equal(got, want), f"{what}: values differ from the expected ones")


def close(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    """Fail unless shapes agree and no element is further off than the tolerance; NaN fails."""
    require(got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(want.shape)}")
    difference = (got - want).abs()
    worst = float(difference.max()) if difference.numel() else 0.0
    require(bool((difference <= tolerance).all()), f"{what}: off by {worst:.3g}, allowed {tolerance:.3g}")


def refused(what: str, call: Callable[..., object], *args: object, words: str = "") -> None:
    """Fail unless the call raises a `MoeCommError` whose message has the words, a regular expression."""
    try:
        call(*args)
    except MoeCommError as error:
        require(re.search(words, str(error)) is not None, f"{what}: refused with other words: {error}")
        return
    raise AssertionError(f"{what}: accepted, expected a MoeCommError")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Fill uninitialised memory with NaN or the largest integer while the context is open."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    settings.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        settings.fill_uninitialized_memory = fill
