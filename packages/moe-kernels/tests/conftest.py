"""Fixtures of this package. Every test runs in poisoned memory (case R130)."""

from collections.abc import Iterator

import pytest

from moe_kernels import passes
from moe_kernels.testing import poisoned_memory


@pytest.fixture(autouse=True)
def poison() -> Iterator[None]:
    with poisoned_memory():
        yield


@pytest.fixture(params=["one pass", "many passes"])
def pass_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pointwise mathematics over all rows at once, and over a few at a time."""
    if request.param == "many passes":
        monkeypatch.setattr(passes, "_ELEMENTS", 50)
