"""Passes over rows: how a tensor is cut."""

import pytest
import torch

from moe_kernels import passes
from moe_kernels.passes import at_most_passes, row_slices


@pytest.fixture
def of_fifty(monkeypatch):
    """Passes of 50 elements."""
    monkeypatch.setattr(passes, "_ELEMENTS", 50)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def lengths(x, dim=0):
    found = list(row_slices(x, dim))
    rows = torch.arange(x.shape[dim])
    assert torch.equal(torch.cat([rows[part] for part in found]), rows)  # each row once, in order
    return [len(rows[part]) for part in found]


def test_passes_have_as_many_rows_as_fit(of_fifty):
    assert lengths(torch.zeros(34, 3)) == [16, 16, 2]
    assert lengths(torch.zeros(2, 34, 3), 1) == [8, 8, 8, 8, 2]
    assert lengths(torch.zeros(3, 70)) == [1, 1, 1]
    assert lengths(torch.zeros(16, 3)) == [16]


def test_a_limit_of_passes_makes_them_larger_and_the_lowest_limit_holds(of_fifty):
    x = torch.zeros(103, 50)
    with at_most_passes(10):
        assert lengths(x) == [11] * 9 + [4]
        with at_most_passes(2):
            assert lengths(x) == [52, 51]
            with at_most_passes(7):
                assert lengths(x) == [52, 51]
        assert lengths(torch.zeros(5, 50)) == [1] * 5
    assert lengths(x) == [1] * 103
