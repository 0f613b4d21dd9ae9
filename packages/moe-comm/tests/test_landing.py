"""Arrived to arranged rows: cases by hand, and that the two directions undo each other."""

import pytest
import torch

from moe_comm.landing import Arrivals, land
from moe_kernels.permute import permute, unpermute


def landed(ids_CK, counts_nsjp, *, experts, block=None, num_rows=None, row_multiple=1):
    """The map where arrived rows come from (lane, place of etp, member, member before it)."""
    counts = torch.tensor(counts_nsjp)
    total = len(ids_CK)
    ids_CK = torch.as_tensor(ids_CK)
    return land(
        ids_CK,
        Arrivals(counts_nsjp=counts, total=total, block=block),
        first_expert=0,
        experts=experts,
        row_multiple=row_multiple,
        num_rows=int((ids_CK >= 0).sum()) if num_rows is None else num_rows,
        exact=num_rows is None,
    )


def test_a_case_by_hand():
    """Two ranks, three experts; rank 0 sent rows for experts 0, 0 and 2, rank 1 for 0 and for 2 and 1 at once."""
    rows = landed([[0, -1], [0, -1], [2, -1], [0, -1], [2, 1]], [[[[3], [2]]]], experts=3)
    assert rows.token_R.tolist() == [0, 1, 3, 4, 2, 4]
    assert rows.counts_E.tolist() == [3, 1, 2]
    assert rows.row_TK.tolist() == [[0, -1], [1, -1], [4, -1], [2, -1], [5, 3]]


def test_ids_of_other_ranks_are_no_rows():
    """A row carries all choices of its token; those of experts elsewhere are not this rank's."""
    arrivals = Arrivals(counts_nsjp=torch.tensor([[[[2]]]]), total=2, block=None)
    rows = land(
        torch.tensor([[3, 0], [9, 2]]), arrivals, first_expert=2, experts=2, row_multiple=1, num_rows=2, exact=True
    )
    assert rows.row_TK.tolist() == [[1, -1], [-1, 0]]


def test_ranks_that_share_an_expert_by_hand():
    """Rows arrive place of etp by place: 0 has a row of member 0 and two of member 1, 1 has two and one.

    They are arranged by source rank, which is member by member and inside a member place by place.
    """
    rows = landed([[0]] * 6, [[[[1], [2]], [[2], [1]]]], experts=1)
    assert rows.token_R.tolist() == [0, 3, 4, 1, 2, 5]


def test_lanes_and_nodes_by_hand():
    """Lane after lane, in each member after member, in each node after node; source ranks are (node, member)."""
    rows = landed([[0]] * 8, [[[[1, 1], [1, 1]]], [[[1, 1], [1, 1]]]], experts=1)
    # Arrived: lane 0 has (node 0, member 0), (1, 0), (0, 1), (1, 1), lane 1 the same.
    assert rows.token_R.tolist() == [0, 4, 2, 6, 1, 5, 3, 7]


def test_padding_between_sources_by_hand():
    """Blocks of three rows, of which two and one are rows; the rest is padding and has no choice."""
    ids = [[0], [0], [-1], [0], [-1], [-1]]
    rows = landed(ids, [[[[2]], [[1]]]], experts=1, block=3, num_rows=4)
    assert rows.choice_R.tolist() == [0, 1, 3, -1]
    assert rows.counts_E.tolist() == [3]
    assert int(rows.overflow) == 0


@pytest.mark.parametrize(("num_rows", "kept"), [(0, []), (2, [0, 1]), (3, [0, 1, 3])])
def test_rows_that_do_not_fit_are_the_last_ones(num_rows, kept):
    """Of expert 0 rows 0, 1 and 3 in the order of sources; expert 1 has row 2, for which there is no room."""
    rows = landed([[0], [0], [1], [0]], [[[[3], [1]]]], experts=2, num_rows=num_rows)
    assert rows.choice_R.tolist() == kept
    assert rows.counts_E.tolist() == [len(kept), 0]


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(
    "counts_nsjp",
    [[[[[3], [0], [2]]]], [[[[0], [0]]]], [[[[4, 1, 9]]]], [[[[3], [1]], [[0], [2]]]], [[[[3, 0], [0, 6]]]] * 2],
)
def test_there_and_back(counts_nsjp, multiple):
    """Back is the sum over a row's copies, and each is the other's gradient; padding rows never come back."""
    total = int(torch.tensor(counts_nsjp).sum())
    generator = torch.Generator().manual_seed(total)
    ids_CK = torch.rand(total, 4, generator=generator).argsort(1)[:, :2].masked_fill(torch.arange(2) == 1, -1)
    most = (total + 4 * 7) // 8 * 8
    rows = landed(ids_CK, counts_nsjp, experts=4, num_rows=most, row_multiple=multiple)
    received = torch.randn(total, 3, dtype=torch.float64, requires_grad=True)
    arranged = permute(received, rows)
    assert torch.equal(unpermute(arranged, rows), received)
    padding_R = rows.choice_R < 0
    assert int(padding_R.sum()) == most - total
    assert not arranged[padding_R].any()
    grad_R = torch.randn_like(arranged)
    (grad_C,) = torch.autograd.grad(arranged, received, grad_R)
    assert torch.equal(grad_C, unpermute(grad_R, rows))
    leaf_R = torch.randn_like(arranged).masked_fill_(padding_R[:, None], torch.nan).requires_grad_()
    returned = unpermute(leaf_R, rows)
    assert returned.isfinite().all()
    (grad_R,) = torch.autograd.grad(returned, leaf_R, received.detach())
    assert torch.equal(grad_R, arranged)
