"""Attention over whole rows by tiles: of documents and windows only what is seen is computed, and no mask spans a row.

Shape legend: B rows, R slots of a whole row, H query heads, G key/value heads, D features of queries and keys, V of
values.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_parallel.context.blocks import Attended, PartialAttention, attend, attend_backward, internal
from moe_parallel.context.tiles import Tile


def tiled_attention(
    q_BRHD: Tensor, k_BRGD: Tensor, v_BRGV: Tensor, tiles: Sequence[Tile], scale: float | None
) -> Tensor:
    """out_BRHV; `tiles` are those of one rank that holds whole rows."""
    scale = q_BRHD.shape[3] ** -0.5 if scale is None else scale
    out_BRHV: Tensor = _Tiled.apply(q_BRHD, k_BRGD, v_BRGV, tiles, scale)  # type: ignore[no-untyped-call]
    return out_BRHV


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BRHD: Tensor, k_BRGD: Tensor, v_BRGV: Tensor, tiles: Sequence[Tile], scale: float
    ) -> Tensor:
        partial = PartialAttention(q_BRHD, v_BRGV.shape[3])
        attend(q_BRHD, k_BRGD, v_BRGV, tiles, scale, partial)
        out_BRHV = partial.out_BSHV.to(q_BRHD.dtype)
        ctx.save_for_backward(q_BRHD, k_BRGD, v_BRGV, out_BRHV, partial.lse_BHS)
        ctx.tiles, ctx.scale = tiles, scale
        return out_BRHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BRHV: Tensor) -> tuple[Tensor | None, ...]:
        q_BRHD, k_BRGD, v_BRGV, out_BRHV, lse_BHR = ctx.saved_tensors
        dq, dk, dv = (x.new_zeros(x.shape, dtype=internal(x.dtype)) for x in (q_BRHD, k_BRGD, v_BRGV))
        attended = Attended(grad_BSHV=grad_BRHV, q_BSHD=q_BRHD, out_BSHV=out_BRHV, lse_BHS=lse_BHR, dq_BSHD=dq)
        attend_backward(attended, k_BRGD, v_BRGV, ctx.tiles, ctx.scale, dk, dv)
        return dq.to(q_BRHD.dtype), dk.to(k_BRGD.dtype), dv.to(v_BRGV.dtype), None, None
