"""`GatherAttention`: every rank gathers all keys and values, and attends with its own queries.

Shape legend: B rows, S slots of a row on this rank, C ranks, H query heads, G key/value heads, D features of queries
and keys, V of values, F = D + V.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_parallel.attention.blocks import Attended, PartialAttention, attend, attend_backward
from moe_parallel.attention.tiles import tiles_of
from moe_parallel.collectives import all_gather, reduce_scatter
from moe_parallel.context.core import ContextAttention
from moe_parallel.precision import internal_dtype
from moe_parallel.sequence import ContextSplit


class GatherAttention(ContextAttention):
    """Attention with one all-gather of keys and values, and one reduce-scatter of their gradients.

    Fewer and larger messages than a ring, for the memory of all keys and values of a layer; they are gathered again in
    the backward, not kept for it. A rank begins with its own keys while the others arrive.
    """

    def attend_shared(
        self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, split: ContextSplit, scale: float, window: int | None
    ) -> Tensor:
        out_BSHV: Tensor = _Gather.apply(q_BSHD, k_BSGD, v_BSGV, split, scale, window)  # type: ignore[no-untyped-call]
        return out_BSHV


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSHD: Tensor,
        k_BSGD: Tensor,
        v_BSGV: Tensor,
        split: ContextSplit,
        scale: float,
        window: int | None,
    ) -> Tensor:
        rank, ranks = split.group.rank(), split.group.size()
        features = [k_BSGD.shape[3], v_BSGV.shape[3]]
        tiles = tiles_of(split).of(rank, window, q_BSHD.device)
        coming = all_gather(torch.cat([k_BSGD, v_BSGV], dim=3), split.group)
        partial = PartialAttention(q_BSHD, features[1])
        attend(q_BSHD, k_BSGD, v_BSGV, tiles[rank], scale, partial)
        kv_CBSGF = torch.unflatten(coming.wait(), 0, (ranks, -1))
        for other in range(ranks):
            if other != rank:
                k, v = torch.split(kv_CBSGF[other], features, dim=3)
                attend(q_BSHD, k, v, tiles[other], scale, partial)
        out_BSHV = partial.out_BSHV.to(q_BSHD.dtype)
        ctx.save_for_backward(q_BSHD, k_BSGD, v_BSGV, out_BSHV, partial.lse_BHS)
        ctx.group, ctx.scale, ctx.tiles = split.group, scale, tiles
        return out_BSHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHV: Tensor) -> tuple[Tensor | None, ...]:
        q_BSHD, k_BSGD, v_BSGV, out_BSHV, lse_BHS = ctx.saved_tensors
        rank, ranks = ctx.group.rank(), ctx.group.size()
        features = [k_BSGD.shape[3], v_BSGV.shape[3]]
        wide = internal_dtype(q_BSHD.dtype)
        kv_BSGF = torch.cat([k_BSGD, v_BSGV], dim=3)
        coming = all_gather(kv_BSGF, ctx.group)
        dq_BSHD = torch.zeros_like(q_BSHD, dtype=wide, memory_format=torch.contiguous_format)
        d_kv_CBSGF = kv_BSGF.new_zeros((ranks, *kv_BSGF.shape), dtype=wide)
        attended = Attended(grad_BSHV=grad_BSHV, q_BSHD=q_BSHD, out_BSHV=out_BSHV, lse_BHS=lse_BHS, dq_BSHD=dq_BSHD)

        def backward_of(other: int, k: Tensor, v: Tensor) -> None:
            dk, dv = torch.split(d_kv_CBSGF[other], features, dim=3)
            attend_backward(attended, k, v, ctx.tiles[other], ctx.scale, dk, dv)

        backward_of(rank, k_BSGD, v_BSGV)
        kv_CBSGF = torch.unflatten(coming.wait(), 0, (ranks, -1))
        for other in range(ranks):
            if other != rank:
                k, v = torch.split(kv_CBSGF[other], features, dim=3)
                backward_of(other, k, v)
        d_kv_BSGF = reduce_scatter(d_kv_CBSGF.flatten(0, 1), ctx.group).wait().to(k_BSGD.dtype)
        dk_BSGD, dv_BSGV = torch.split(d_kv_BSGF, features, dim=3)
        return dq_BSHD.to(q_BSHD.dtype), dk_BSGD, dv_BSGV, None, None, None
