"""Fixtures of this package's tests."""

from collections.abc import Iterator

import pytest

from moe_kernels.testing import poisoned_memory


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Uninitialised memory is NaN (case R130)."""
    with poisoned_memory():
        yield
