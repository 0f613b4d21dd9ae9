"""`RingAttention`: keys and values travel around the ranks while every rank attends to those it has.

Step i of C: rank r attends to the keys of rank r - i, passes them on to rank r + 1, and receives the next ones from
rank r - 1 meanwhile. In the backward the gradients of keys and values follow them and end at their owner.
(arXiv 2310.01889; with head-tail pieces arXiv 2405.07719.)

Shape legend: B rows, S slots of a row on this rank, H query heads, G key/value heads, D features of queries and keys,
V of values, F = D + V.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_parallel.attention.blocks import Attended, PartialAttention, attend, attend_backward
from moe_parallel.attention.tiles import tiles_of
from moe_parallel.context.core import ContextAttention
from moe_parallel.point_to_point import shift
from moe_parallel.precision import internal_dtype
from moe_parallel.sequence import ContextSplit


class RingAttention(ContextAttention):
    """Attention with C - 1 exchanges of keys and values between neighbours.

    At no time does a rank hold the keys and values of more than two ranks (its own inputs apart), and in the backward
    the gradients of three. Any split works; head-tail pieces make the ranks equally busy.
    """

    def attend_shared(
        self, q_BSHD: Tensor, k_BSGD: Tensor, v_BSGV: Tensor, split: ContextSplit, scale: float, window: int | None
    ) -> Tensor:
        out_BSHV: Tensor = _Ring.apply(q_BSHD, k_BSGD, v_BSGV, split, scale, window)  # type: ignore[no-untyped-call]
        return out_BSHV


class _Ring(torch.autograd.Function):
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
        group = split.group
        rank, ranks = group.rank(), group.size()
        features = [k_BSGD.shape[3], v_BSGV.shape[3]]
        tiles = tiles_of(split).of(rank, window, q_BSHD.device)
        partial = PartialAttention(q_BSHD, features[1])
        kv_BSGF = torch.cat([k_BSGD, v_BSGV], dim=3)
        spare_BSGF = torch.empty_like(kv_BSGF)
        for step in range(ranks):
            coming = shift(kv_BSGF, group, spare_BSGF) if step + 1 < ranks else None
            k, v = torch.split(kv_BSGF, features, dim=3)
            attend(q_BSHD, k, v, tiles[(rank - step) % ranks], scale, partial)
            if coming is not None:
                kv_BSGF, spare_BSGF = coming.wait(), kv_BSGF
        out_BSHV = partial.out_BSHV.to(q_BSHD.dtype)
        ctx.save_for_backward(q_BSHD, k_BSGD, v_BSGV, out_BSHV, partial.lse_BHS)
        ctx.group, ctx.scale, ctx.tiles = group, scale, tiles
        return out_BSHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHV: Tensor) -> tuple[Tensor | None, ...]:
        q_BSHD, k_BSGD, v_BSGV, out_BSHV, lse_BHS = ctx.saved_tensors
        group = ctx.group
        rank, ranks = group.rank(), group.size()
        features = [k_BSGD.shape[3], v_BSGV.shape[3]]
        wide = internal_dtype(q_BSHD.dtype)
        dq_BSHD = torch.zeros_like(q_BSHD, dtype=wide, memory_format=torch.contiguous_format)
        attended = Attended(grad_BSHV=grad_BSHV, q_BSHD=q_BSHD, out_BSHV=out_BSHV, lse_BHS=lse_BHS, dq_BSHD=dq_BSHD)
        kv_BSGF = torch.cat([k_BSGD, v_BSGV], dim=3)
        spare_BSGF = torch.empty_like(kv_BSGF)
        leaving = None
        for step in range(ranks):
            coming = shift(kv_BSGF, group, spare_BSGF) if step + 1 < ranks else None
            d_kv_BSGF = torch.zeros_like(kv_BSGF, dtype=wide)
            k, v = torch.split(kv_BSGF, features, dim=3)
            dk, dv = torch.split(d_kv_BSGF, features, dim=3)
            attend_backward(attended, k, v, ctx.tiles[(rank - step) % ranks], ctx.scale, dk, dv)
            if leaving is not None:
                d_kv_BSGF += leaving.wait()  # the ranks before have added theirs
            leaving = shift(d_kv_BSGF, group)
            if coming is not None:
                kv_BSGF, spare_BSGF = coming.wait(), kv_BSGF
        assert leaving is not None
        dk_BSGD, dv_BSGV = torch.split(leaving.wait().to(k_BSGD.dtype), features, dim=3)
        return dq_BSHD.to(q_BSHD.dtype), dk_BSGD, dv_BSGV, None, None, None
