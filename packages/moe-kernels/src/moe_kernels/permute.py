"""Tokens to rows sorted by expert, and back: the permutation around the experts on one device.

`permute` gathers, `unpermute` gathers and adds, and each is the other's backward, so nothing is ever accumulated
through repeated indices: the sum of a token runs over its choices in their order, whatever order the experts ran in.

Shape legend: T tokens, K choices per token, D model, E experts, R rows (padding included).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_kernels.dtypes import internal_dtype
from moe_kernels.errors import MoeKernelsError
from moe_kernels.implementation import uses_triton
from moe_kernels.row_map import RowMap as RowMap, most_rows as most_rows, row_map as row_map


def permute(x_TD: Tensor, map: RowMap) -> Tensor:  # noqa: A002
    """One row per choice, sorted by expert: rows_RD in the dtype of x; padding rows are zero.

    No host synchronisation. The gradient of a token is the sum over its rows, as in `unpermute`.
    """
    _require_rows(x_TD, map.num_tokens, "tokens")
    return _permute(x_TD, None, map)[0]


def permute_with_probs(x_TD: Tensor, probs_TK: Tensor, map: RowMap) -> tuple[Tensor, Tensor]:  # noqa: A002
    """`permute` and `permute_probs` at once, in one kernel and a single one backward."""
    _require_rows(x_TD, map.num_tokens, "tokens")
    _require_rows(probs_TK, map.num_tokens, "tokens")
    return _permute(x_TD, probs_TK, map)


def permute_probs(probs_TK: Tensor, map: RowMap) -> Tensor:  # noqa: A002
    """The probability of each row, probs_R; zero for padding rows, no gradient for choices without a row."""
    _require_rows(probs_TK, map.num_tokens, "tokens")
    return _permute_probs(probs_TK, map)


def unpermute(rows_RD: Tensor, map: RowMap) -> Tensor:  # noqa: A002
    """Sum each token's rows over k = 0, 1, ..: y_TD; a token without rows gets zero.

    The sum runs in the internal dtype and is cast once to the dtype of the rows. No host synchronisation.
    """
    _require_rows(rows_RD, map.num_rows, "rows")
    return _unpermute(rows_RD, map)


def unpermute_with_probs(rows_RD: Tensor, probs_R: Tensor, map: RowMap) -> tuple[Tensor, Tensor]:  # noqa: A002
    """The transpose of `permute_with_probs`, and not differentiable: y_TD as `unpermute`, and probs_TK.

    A choice without a row gets 0.
    """
    _require_rows(rows_RD, map.num_rows, "rows")
    _require_rows(probs_R, map.num_rows, "rows")
    y_TD, probs_TK = _tokens(rows_RD.detach(), probs_R.detach(), map, _fuses(rows_RD, probs_R))
    assert probs_TK is not None
    return y_TD, probs_TK


def _require_rows(x: Tensor, rows: int, noun: str) -> None:
    if x.shape[0] != rows:
        raise MoeKernelsError(f"the map is of {rows} {noun}, the tensor has {x.shape[0]}")


def _rows(x_TD: Tensor, probs_TK: Tensor | None, layout: RowMap, triton: bool) -> tuple[Tensor, Tensor | None]:
    if triton:
        from moe_kernels.triton_kernels import permute as kernels

        rows_RD, probs_R = kernels.permute(x_TD, probs_TK, layout.row_TK, layout.choice_R, layout.is_padded)
        return rows_RD, None if probs_TK is None else probs_R
    return _gather(x_TD, layout), None if probs_TK is None else _gather_probs(probs_TK, layout)


def _tokens(rows_RD: Tensor, probs_R: Tensor | None, layout: RowMap, triton: bool) -> tuple[Tensor, Tensor | None]:
    if triton:
        from moe_kernels.triton_kernels import permute as kernels

        y_TD, probs_TK = kernels.unpermute(rows_RD, probs_R, layout.row_TK)
        return y_TD, None if probs_R is None else probs_TK
    return _gather_sum(rows_RD, layout), None if probs_R is None else _probs_of_choices(probs_R, layout)


def _gather(x_TD: Tensor, layout: RowMap) -> Tensor:
    if layout.num_rows == 0:
        return x_TD.new_empty(0, x_TD.shape[1])
    if layout.num_tokens == 0:
        return x_TD.new_zeros(layout.num_rows, x_TD.shape[1])
    rows_RD = x_TD.index_select(0, layout.token_R)
    return rows_RD.masked_fill_(layout.choice_R[:, None] < 0, 0) if layout.is_padded else rows_RD


def _gather_sum(rows_RD: Tensor, layout: RowMap) -> Tensor:
    if layout.num_rows == 0 or rows_RD.shape[1] == 0:
        return rows_RD.new_zeros(layout.num_tokens, rows_RD.shape[1])
    bags = layout.bags
    if bags is None:
        y_TD = rows_RD.new_zeros(layout.num_tokens, rows_RD.shape[1], dtype=internal_dtype(rows_RD.dtype))
        for row_T in layout.row_TK.unbind(1):
            y_TD += rows_RD.index_select(0, row_T.clamp(min=0)).masked_fill_(row_T[:, None] < 0, 0)
        return y_TD.to(rows_RD.dtype)
    # An embedding bag is this sum in one pass over the rows: it adds in index order in the internal dtype and rounds
    # once (fbgemm's bf16 rounds ties away from zero). Against index_select and sum it took 0.13 to 0.52 ms in fp32 and
    # 0.11 to 1.3 ms in bf16 for 8192 x 128 on a CPU.
    return torch.embedding_bag(rows_RD.contiguous(), *bags)[0]


def _gather_probs(probs_TK: Tensor, layout: RowMap) -> Tensor:
    if layout.num_rows == 0 or probs_TK.numel() == 0:
        return probs_TK.new_zeros(layout.num_rows)
    if not layout.is_padded:
        return probs_TK.reshape(-1).index_select(0, layout.choice_R)
    probs_R = probs_TK.reshape(-1).index_select(0, layout.choice_R.clamp(min=0))
    return probs_R.masked_fill_(layout.choice_R < 0, 0)


def _probs_of_choices(probs_R: Tensor, layout: RowMap) -> Tensor:
    row_TK = layout.row_TK
    if layout.num_rows == 0:
        return probs_R.new_zeros(row_TK.shape)
    probs_TK = probs_R.index_select(0, row_TK.view(-1).clamp(min=0)).view(row_TK.shape)
    return probs_TK.masked_fill_(row_TK < 0, 0)


def _fuses(x: Tensor, probs: Tensor | None = None) -> bool:
    """Whether a kernel does it. Rows without features are left to the plain code."""
    return uses_triton(x) and x.shape[1] > 0 and (probs is None or uses_triton(probs))


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, probs_TK: Tensor | None, layout: RowMap) -> tuple[Tensor, Tensor | None]:
        ctx.layout, ctx.triton = layout, _fuses(x_TD, probs_TK)
        return _rows(x_TD, probs_TK, layout, ctx.triton)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor, grad_R: Tensor | None) -> tuple[Tensor, Tensor | None, None]:
        return *_tokens(grad_RD, grad_R, ctx.layout, ctx.triton), None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, layout: RowMap) -> Tensor:
        ctx.layout, ctx.triton = layout, _fuses(rows_RD)
        return _tokens(rows_RD, None, layout, ctx.triton)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> tuple[Tensor, None]:
        return _rows(grad_TD, None, ctx.layout, ctx.triton)[0], None


class _PermuteProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs_TK: Tensor, layout: RowMap) -> Tensor:
        ctx.layout = layout
        return _gather_probs(probs_TK, layout)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None]:
        return _probs_of_choices(grad_R, ctx.layout), None


_permute: Callable[..., tuple[Tensor, Tensor]] = _Permute.apply
_unpermute: Callable[..., Tensor] = _Unpermute.apply
_permute_probs: Callable[..., Tensor] = _PermuteProbs.apply
