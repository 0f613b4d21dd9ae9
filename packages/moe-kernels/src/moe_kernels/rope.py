"""Rotary positions (arXiv 2104.09864), in the half-split convention of Llama and Qwen.

Feature i of a head and feature i + F/2 are a pair that is turned by the angle position * base^(-2i/F).
Shape legend: B sequences, S slots, H heads, D features of a head, F rotated features.
"""

from collections.abc import Callable
from math import ceil, floor, log, pi
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_kernels.config import YarnConfig
from moe_kernels.dtypes import internal_dtype
from moe_kernels.errors import MoeKernelsError
from moe_kernels.implementation import uses_triton
from moe_kernels.passes import row_slices, write


def rope_tables(
    position_BS: Tensor,
    rotary_features: int,
    base: float,
    dtype: torch.dtype,
    yarn: YarnConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine of every angle, each [B, S, F], for `apply_rope`; made once per batch.

    Both halves of the cosine are equal; the first half of the sine is negative, as the rotation needs it.

    Args:
        position_BS: integer positions.
        rotary_features: F, even.
        base: of the geometric series of frequencies.
        dtype: of the tensors to rotate; the tables are in its internal dtype.
        yarn: stretches positions, and scales the tables.

    Raises:
        MoeKernelsError: odd F.
    """
    if rotary_features % 2:
        raise MoeKernelsError(
            f"rotary positions turn pairs of features, so {rotary_features} of them cannot be rotated"
        )
    internal = internal_dtype(dtype)
    exponent = torch.arange(0, rotary_features, 2, dtype=internal, device=position_BS.device) / rotary_features
    angle = position_BS[..., None].to(internal) / base**exponent
    if yarn is not None and yarn.factor > 1:
        angle = angle * _yarn_stretch(yarn, rotary_features, base, angle)
    cos, sin = angle.cos(), angle.sin()
    if yarn is not None and yarn.factor > 1:
        size = _yarn_magnitude(yarn.factor, yarn.mscale) / _yarn_magnitude(yarn.factor, yarn.mscale_all_dim)
        cos, sin = cos * size, sin * size
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def yarn_softmax_factor(yarn: YarnConfig) -> float:
    """Factor on the scale of the softmax of attention: the square of (0.1 mscale_all_dim ln(factor) + 1)."""
    return _yarn_magnitude(yarn.factor, yarn.mscale_all_dim) ** 2


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * log(factor) + 1 if factor > 1 else 1.0


def _yarn_stretch(yarn: YarnConfig, rotary_features: int, base: float, like: Tensor) -> Tensor:
    """What the frequency of each pair is multiplied by, [F/2]: 1 where it turns often within the original context,
    1 / factor where it turns rarely, and a ramp between them."""

    def pair_that_turns(times: float) -> float:
        return rotary_features * log(yarn.original_tokens / (times * 2 * pi)) / (2 * log(base))

    first, last = pair_that_turns(yarn.beta_fast), pair_that_turns(yarn.beta_slow)
    if yarn.truncate:
        first, last = floor(first), ceil(last)
    first, last = max(first, 0), min(last, rotary_features - 1)
    pair = torch.arange(rotary_features // 2, dtype=like.dtype, device=like.device)
    stretched = ((pair - first) / (last - first or 0.001)).clamp(0, 1)
    return stretched / yarn.factor + (1 - stretched)


def apply_rope(x_BSHD: Tensor, cos_BSF: Tensor, sin_BSF: Tensor) -> Tensor:
    """Rotate the first F features of every head; the others pass through. In the dtype of x, rounded once.

    Only the tables are kept for the backward pass, which rotates by the negative angle.

    Raises:
        MoeKernelsError: heads narrower than the tables, or tables of other positions.
    """
    batch, slots, _, features = x_BSHD.shape
    of_batch, of_slots, rotated = cos_BSF.shape
    if features < rotated:
        raise MoeKernelsError(f"heads of {features} features cannot rotate {rotated} of them")
    if (batch, slots) != (of_batch, of_slots):
        raise MoeKernelsError(f"tables for {(of_batch, of_slots)} positions cannot rotate {(batch, slots)} of them")
    return _rope(x_BSHD, cos_BSF, sin_BSF)


def _rotate(x_BSHD: Tensor, cos_BSF: Tensor, sin_BSF: Tensor, sign: float, triton: bool) -> Tensor:
    y_BSHD: Tensor
    if triton:
        from moe_kernels.triton_kernels import rope as kernels

        y_BSHD = kernels.rope(x_BSHD, cos_BSF, sin_BSF, sign)
        return y_BSHD
    rotated = cos_BSF.shape[-1]
    y_BSHD = x_BSHD.new_empty(x_BSHD.shape)
    for slots in row_slices(x_BSHD, 1):
        x = x_BSHD[:, slots, :, :rotated].to(cos_BSF.dtype)
        cos, sin = cos_BSF[:, slots, None], sin_BSF[:, slots, None]
        # Swapping the halves is a roll; with the sign in the table no negated copy is needed.
        rolled = x.roll(rotated // 2, -1)
        write(y_BSHD[:, slots, :, :rotated], torch.addcmul, x * cos, rolled, sin, value=sign)
    if rotated < x_BSHD.shape[-1]:
        y_BSHD[..., rotated:] = x_BSHD[..., rotated:]
    return y_BSHD


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHD: Tensor, cos_BSF: Tensor, sin_BSF: Tensor) -> Tensor:
        ctx.save_for_backward(cos_BSF, sin_BSF)
        ctx.triton = uses_triton(x_BSHD)
        return _rotate(x_BSHD, cos_BSF, sin_BSF, 1.0, ctx.triton)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHD: Tensor) -> tuple[Tensor, None, None]:
        cos_BSF, sin_BSF = ctx.saved_tensors
        return _rotate(grad_BSHD, cos_BSF, sin_BSF, -1.0, ctx.triton), None, None


_rope: Callable[..., Tensor] = _Rope.apply
