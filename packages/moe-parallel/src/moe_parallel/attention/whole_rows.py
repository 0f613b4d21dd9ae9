"""Attention over rows that this rank holds whole: causal by torch's kernel, documents and windows by tiles.

Of documents and windows only what is seen is computed, and no mask spans a row.

Shape legend: B rows, R slots of a whole row, H query heads, G key/value heads, D features of queries and keys, V of
values.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_parallel.attention.blocks import Attended, PartialAttention, attend, attend_backward
from moe_parallel.attention.tiles import RowTiles, Tile
from moe_parallel.precision import internal_dtype
from moe_parallel.sequence import ContextSplit, SequenceInfo, once_per_microbatch


def attend_to_rows(
    q_BRHD: Tensor,
    k_BRGD: Tensor,
    v_BRGV: Tensor,
    microbatch: SequenceInfo | ContextSplit,
    document_BR: Tensor | None,
    scale: float,
    window: int | None,
) -> Tensor:
    """out_BRHV, in slot order.

    Args:
        microbatch: what the tiles of these rows are kept with.
        document_BR: document numbers of the rows; None where a row is one document.

    Raises:
        MoeParallelError: the slots of a document are not consecutive.
    """
    batch, slots = q_BRHD.shape[:2]
    if document_BR is None and (window is None or window >= slots):
        return _causal(q_BRHD, k_BRGD, v_BRGV, scale)
    slot_1BR = torch.arange(slots).expand(1, batch, -1)
    rows = once_per_microbatch(microbatch, ("whole rows", batch, slots), lambda: RowTiles(slot_1BR, document_BR))
    tiles = rows.of(0, window, q_BRHD.device)[0]
    out_BRHV: Tensor = _Tiled.apply(q_BRHD, k_BRGD, v_BRGV, tiles, scale)  # type: ignore[no-untyped-call]
    return out_BRHV


def _causal(q_BRHD: Tensor, k_BRGD: Tensor, v_BRGV: Tensor, scale: float) -> Tensor:
    value_features = v_BRGV.shape[3]
    if value_features < q_BRHD.shape[3]:
        # With values narrower than keys torch leaves its fused kernels, and holds all scores at once.
        v_BRGV = F.pad(v_BRGV, (0, q_BRHD.shape[3] - value_features))
    heads, groups = q_BRHD.shape[2], k_BRGD.shape[2]
    if heads != groups and not _kernel_knows_groups(q_BRHD.device, q_BRHD.dtype):
        k_BRGD, v_BRGV = (x.repeat_interleave(heads // groups, dim=2) for x in (k_BRGD, v_BRGV))
    # Grouped heads inside the kernel: 4-8 % faster than expanding k and v first (CPU, forward and backward,
    # B16 S256 H4 G2 D32, float32 and bfloat16), and k and v are not held twice.
    out_BHRV = F.scaled_dot_product_attention(
        q_BRHD.transpose(1, 2),
        k_BRGD.transpose(1, 2),
        v_BRGV.transpose(1, 2),
        is_causal=True,
        scale=scale,
        enable_gqa=heads != k_BRGD.shape[2],
    )
    return out_BHRV[..., :value_features].transpose(1, 2)


def _kernel_knows_groups(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has a kernel for grouped heads that does not hold all scores.

    On CUDA only flash is one (torch's notes on `scaled_dot_product_attention`), and it takes 16 bits alone.
    """
    return device.type != "cuda" or dtype in (torch.bfloat16, torch.float16)


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
        dq, dk, dv = (x.new_zeros(x.shape, dtype=internal_dtype(x.dtype)) for x in (q_BRHD, k_BRGD, v_BRGV))
        attended = Attended(grad_BSHV=grad_BRHV, q_BSHD=q_BRHD, out_BSHV=out_BRHV, lse_BHS=lse_BHR, dq_BSHD=dq)
        attend_backward(attended, k_BRGD, v_BRGV, ctx.tiles, ctx.scale, dk, dv)
        return dq.to(q_BRHD.dtype), dk.to(k_BRGD.dtype), dv.to(v_BRGV.dtype), None, None
