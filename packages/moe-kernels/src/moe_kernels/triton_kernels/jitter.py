"""Multiplicative noise, drawn where it is used: the numbers of `counter_random`, bit for bit.

Shape legend: T tokens, D features.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from moe_kernels import counter_random
from moe_kernels.triton_kernels.compiled import CompileCase
from moe_kernels.triton_kernels.memory_bound import compile_case, feature_rows, in_all_dtypes, tile
from moe_kernels.triton_kernels.operator import operator

# Features that a program takes at a time, and elements of its tile.
_WIDEST = 1024
_TILE = 1024

_INCREMENT = tl.constexpr(counter_random.INCREMENT)
_FIRST, _SECOND = (tl.constexpr(multiplier) for multiplier in counter_random.MULTIPLIERS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (tl.constexpr(shift) for shift in counter_random.SHIFTS)
_BITS = tl.constexpr(counter_random.BITS)


@triton.jit
def _mix(x):
    x = (x ^ (x >> _SHIFT_1)) * tl.full([], _FIRST, tl.uint64)
    x = (x ^ (x >> _SHIFT_2)) * tl.full([], _SECOND, tl.uint64)
    return x ^ (x >> _SHIFT_3)


@triton.jit
def jitter_kernel(
    x_ptr,
    index_ptr,
    y_ptr,
    x_stride,
    T,
    amount,
    key_ptr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    feature = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (row < T)[:, None] & (feature < D)[None, :]
    increment = tl.full([], _INCREMENT, tl.uint64)
    index = tl.load(index_ptr + row, row < T, other=0).to(tl.uint64)
    token = _mix(index * increment + tl.load(key_ptr).to(tl.uint64))
    mixed = _mix(token[:, None] + ((feature + 1).to(tl.uint64) * increment)[None, :])
    uniform = (mixed >> (64 - _BITS)).to(tl.int32).to(tl.float32) * (0.5**_BITS)
    x = tl.load(x_ptr + row[:, None] * x_stride + feature[None, :], mask, other=0.0).to(tl.float32)
    y = x * (1.0 + amount * (2.0 * uniform - 1.0))
    tl.store(y_ptr + row[:, None] * D + feature[None, :], y.to(y_ptr.dtype.element_ty), mask)


@operator(
    "jitter(Tensor x, Tensor index, float amount, Tensor key) -> Tensor",
    fake=lambda x, index, amount, key: x.new_empty(x.shape),
)
def jitter(x_TD: Tensor, index_T: Tensor, amount: float, key: Tensor) -> Tensor:
    """x times numbers in [1 - amount, 1 + amount), which depend on the key, the index of the token and the feature."""
    x_TD = feature_rows(x_TD)
    tokens, features = x_TD.shape
    y_TD = x_TD.new_empty(x_TD.shape)
    rows, width = tile(features, _WIDEST, _TILE)
    jitter_kernel[(cdiv(tokens, rows), cdiv(features, width))](
        x_TD,
        index_T.contiguous(),
        y_TD,
        x_TD.stride(0),
        tokens,
        amount,
        key,
        D=features,
        BLOCK_D=width,
        ROWS=rows,
    )
    return y_TD


COMPILE_CASES: tuple[CompileCase, ...] = in_all_dtypes(
    compile_case(
        f"jitter bf16 D{features}",
        jitter_kernel,
        {"D": features, "BLOCK_D": _WIDEST, "ROWS": 1},
        types={"index_ptr": "*i64", "amount": "fp32", "key_ptr": "*i64"},
        num_warps=4,
    )
    for features in (7168, 2048)
)
