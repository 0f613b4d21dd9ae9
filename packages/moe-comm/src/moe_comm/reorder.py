"""Rows in another order, some of them padding: a gather there and a gather back, each the other's backward.

Shape legend: S ranks that share an expert (etp), W expert-parallel ranks, E experts on this rank, C received rows,
R arranged rows (padding included), D features. Source ranks are all of S x W, S fastest.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, kw_only=True)
class Reorder:
    """Received rows to arranged rows; every received row has one place.

    Attributes:
        source_R: int64, received row of each arranged row; -1 for padding.
        place_C: int64, arranged row of each received row.
    """

    source_R: Tensor
    place_C: Tensor


def by_expert(counts_SWE: Tensor, ends_E: Tensor, *, num_received: int, num_rows: int) -> Reorder:
    """From the order of arrival, that of `counts_SWE`, to (local expert, source rank): the axes in reverse.

    Inside a block rows keep their order. The host is not synchronised.

    Args:
        counts_SWE: int64, rows received from each rank for each local expert.
        ends_E: int64, inclusive end of each expert's arranged rows, padding included.
        num_received: C, the sum of the counts.
        num_rows: R, the last of the ends.
    """
    counts_EWS = counts_SWE.permute(2, 1, 0)
    begin_E = torch.cat((ends_E.new_zeros(1), ends_E[:-1]))
    within_E = counts_EWS.flatten(1)
    arranged_EWS = (begin_E[:, None] + within_E.cumsum(1) - within_E).view(counts_EWS.shape)
    counts = counts_SWE.flatten()
    shift = arranged_EWS.permute(2, 1, 0).flatten() - (counts.cumsum(0) - counts)
    shift_C = shift.repeat_interleave(counts, output_size=num_received)
    row_C = torch.arange(num_received, device=counts.device)
    place_C = row_C + shift_C
    # Every received row has a place of its own, so this writes each place at most once.
    source_R = torch.full((num_rows,), -1, device=counts.device).scatter_(0, place_C, row_C)
    return Reorder(source_R=source_R, place_C=place_C)


def arrange_rows(received: Tensor, order: Reorder) -> Tensor:
    """[C, ..] to [R, ..]; padding rows are zero."""
    return _reorder(received, order.source_R, order.place_C)


def return_rows(arranged: Tensor, order: Reorder) -> Tensor:
    """[R, ..] to [C, ..]; padding rows are left out and get a zero gradient."""
    return _reorder(arranged, order.place_C, order.source_R)


def _gather(rows: Tensor, source: Tensor) -> Tensor:
    gathered = rows.index_select(0, source.clamp(min=0))
    if gathered.shape[0] <= rows.shape[0]:  # no padding: the other direction has as many rows or more
        return gathered
    return gathered.masked_fill_((source < 0).view(-1, *[1] * (rows.dim() - 1)), 0)


class _Reorder(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, back: Tensor) -> Tensor:
        ctx.back = back
        return _gather(rows, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _gather(grad, ctx.back), None, None


_reorder: Callable[..., Tensor] = _Reorder.apply
