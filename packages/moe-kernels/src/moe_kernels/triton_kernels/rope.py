"""Rotary positions in one kernel, that also copies the features which are not rotated.

Shape legend: B sequences, S slots, H heads, D features of a head, F rotated features; N = B*S*H heads of all tokens.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from moe_kernels.triton_kernels.compiled import CompileCase
from moe_kernels.triton_kernels.memory_bound import compile_case, in_all_dtypes
from moe_kernels.triton_kernels.operator import operator

# Pairs of features of a program: eight a thread.
_TILE = 1024
_NUM_WARPS = 4


@triton.jit(do_not_specialize=["num_slots", "num_heads_of_all"])
def rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    sign,
    num_slots,
    num_heads_of_all,
    x_b_stride,
    x_s_stride,
    x_h_stride,
    H: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """A rotation with sign 1, and its inverse with -1. The heads of a token find its angles in the cache."""
    head_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    here = (head_N < num_heads_of_all)[:, None]
    token_N = head_N // H
    sequence_N, slot_N = (token_N // num_slots).to(tl.int64), (token_N % num_slots).to(tl.int64)
    start_N = sequence_N * x_b_stride + slot_N * x_s_stride + (head_N % H) * x_h_stride
    x_ptr_N1, y_ptr_N1 = x_ptr + start_N[:, None], y_ptr + (head_N.to(tl.int64) * D)[:, None]
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    mask = here & (pair < F // 2)
    # The second halves of the tables: the cosine's are equal, and the sine's first half is the negative.
    angle = (token_N.to(tl.int64) * F)[:, None] + F // 2 + pair
    cos = tl.load(cos_ptr + angle, mask, other=0.0)
    sin = tl.load(sin_ptr + angle, mask, other=0.0) * sign
    first = tl.load(x_ptr_N1 + pair, mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr_N1 + F // 2 + pair, mask, other=0.0).to(tl.float32)
    tl.store(y_ptr_N1 + pair, (first * cos - second * sin).to(y_ptr.dtype.element_ty), mask)
    tl.store(y_ptr_N1 + F // 2 + pair, (second * cos + first * sin).to(y_ptr.dtype.element_ty), mask)
    if F < D:
        rest = F + tl.arange(0, BLOCK_REST)[None, :]
        mask = here & (rest < D)
        tl.store(y_ptr_N1 + rest, tl.load(x_ptr_N1 + rest, mask, other=0.0), mask)


@operator(
    "rope(Tensor x, Tensor cos, Tensor sin, float sign) -> Tensor", fake=lambda x, cos, sin, sign: x.new_empty(x.shape)
)
def rope(x_BSHD: Tensor, cos_BSF: Tensor, sin_BSF: Tensor, sign: float) -> Tensor:
    """y [B, S, H, D], contiguous, of x with any strides."""
    if x_BSHD.stride(3) != 1:
        x_BSHD = x_BSHD.contiguous()
    y_BSHD = x_BSHD.new_empty(x_BSHD.shape)
    slots, heads, features = x_BSHD.shape[1:]
    heads_of_all = x_BSHD.shape[0] * slots * heads
    sizes = _sizes(heads, features, cos_BSF.shape[2])
    rope_kernel[(cdiv(heads_of_all, sizes["BLOCK_N"]),)](
        x_BSHD,
        cos_BSF.contiguous(),
        sin_BSF.contiguous(),
        y_BSHD,
        sign,
        slots,
        heads_of_all,
        *x_BSHD.stride()[:3],
        **sizes,
        num_warps=_NUM_WARPS,
    )
    return y_BSHD


def _sizes(heads: int, features: int, rotated: int) -> dict[str, int]:
    pairs = next_power_of_2(rotated // 2)
    return {
        "H": heads,
        "D": features,
        "F": rotated,
        "BLOCK_N": max(_TILE // pairs, 1),
        "BLOCK_PAIRS": pairs,
        "BLOCK_REST": next_power_of_2(max(features - rotated, 1)),
    }


def _compile_cases() -> tuple[CompileCase, ...]:
    # Queries and keys of Qwen3-30B-A3B, and queries and the one rotated key of DeepSeek-V3.
    heads = ((32, 128, 128), (4, 128, 128), (128, 192, 64), (1, 64, 64))
    types = {"cos_ptr": "*fp32", "sin_ptr": "*fp32", "sign": "fp32"}
    return tuple(
        compile_case(f"rope bf16 H{h} D{d} F{f}", rope_kernel, _sizes(h, d, f), types=types, num_warps=_NUM_WARPS)
        for h, d, f in heads
    )


COMPILE_CASES = in_all_dtypes(_compile_cases())
