"""Received to arranged rows: a case by hand, and that the two directions undo each other."""

import pytest
import torch

from moe_comm.reorder import arrange_rows, by_expert, return_rows


def order_of(counts_SWE, multiple):
    counts_SWE = torch.tensor(counts_SWE)
    ends_E = ((counts_SWE.sum((0, 1)) + multiple - 1) // multiple * multiple).cumsum(0)
    return by_expert(counts_SWE, ends_E, num_received=int(counts_SWE.sum()), num_rows=int(ends_E[-1]))


def test_a_case_by_hand():
    """Two ranks, three experts; rank 0 sent rows 0 1 | - | 2, rank 1 sent 3 | - | 4 5."""
    order = order_of([[[2, 0, 1], [1, 0, 2]]], multiple=4)
    assert order.source_R.tolist() == [0, 1, 3, -1, 2, 4, 5, -1]
    assert order.place_C.tolist() == [0, 1, 4, 2, 5, 6]
    arranged = arrange_rows(torch.tensor([10.0, 11.0, 12.0, 13.0, 14.0, 15.0]), order)
    assert arranged.tolist() == [10.0, 11.0, 13.0, 0.0, 12.0, 14.0, 15.0, 0.0]


def test_ranks_that_share_an_expert_by_hand():
    """Rows arrive shard by shard: shard 0 has 0 | 1 of place 0 and 2 3 | - of place 1, shard 1 has - | 4 and 5 | 6.

    They are arranged by source rank, which is place by place and inside a place shard by shard.
    """
    order = order_of([[[1, 1], [2, 0]], [[0, 1], [1, 1]]], multiple=1)
    assert order.source_R.tolist() == [0, 2, 3, 5, 1, 4, 6]
    assert order.place_C.tolist() == [0, 4, 1, 2, 5, 3, 6]


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(
    "counts_SWE",
    [
        [[[3, 0, 2], [0, 0, 5], [1, 0, 0]]],
        [[[0, 0], [0, 0]]],
        [[[4, 1, 9]]],
        [[[4], [0], [7]]],
        [[[3, 1]], [[0, 2]], [[5, 4]]],
        [[[3, 0, 2], [0, 6, 5]], [[1, 0, 0], [2, 4, 1]]],
    ],
)
def test_there_and_back(counts_SWE, multiple):
    """Back is the inverse, and each is the other's gradient; what stands in padding rows never comes back."""
    order = order_of(counts_SWE, multiple)
    received = torch.randn(len(order.place_C), 3, dtype=torch.float64, requires_grad=True)
    arranged = arrange_rows(received, order)
    assert torch.equal(return_rows(arranged, order), received)
    padding_R = order.source_R < 0
    assert int(padding_R.sum()) == len(order.source_R) - len(received)
    assert not arranged[padding_R].any()

    grad_R = torch.randn_like(arranged)
    (grad_C,) = torch.autograd.grad(arranged, received, grad_R)
    assert torch.equal(grad_C, return_rows(grad_R, order))
    leaf_R = torch.randn_like(arranged).masked_fill_(padding_R[:, None], torch.nan).requires_grad_()
    returned = return_rows(leaf_R, order)
    assert returned.isfinite().all()
    (grad_R,) = torch.autograd.grad(returned, leaf_R, received.detach())
    assert torch.equal(grad_R, arranged)
