"""RMSNorm of rows, and of the sum of two: a kernel forward, and one backward with an ordered sum over its programs.

Shape legend: R rows, D features, P programs of the backward pass.
"""

from math import prod
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from moe_kernels.triton_kernels.compiled import CompileCase
from moe_kernels.triton_kernels.memory_bound import compile_case, feature_rows, in_all_dtypes, tile
from moe_kernels.triton_kernels.operator import operator

# Longest row that a program keeps in registers, and elements of the tile of one that keeps several.
_WIDEST, _TILE = 16_384, 4_096
# Programs of the backward pass, each with a sum for every weight: two for every multiprocessor of an H100, so that the
# sums are a few per cent of what is read, and the same number on every device, so that results are.
_PROGRAMS = 264
_SUM_BLOCKS = {"BLOCK_P": 32, "BLOCK_D": 64}


@triton.jit
def _row(x_ptr, residual_ptr, rows, x_stride, cols, mask, D: tl.constexpr):
    """x, or the sum of both rounded to their dtype, as it is stored."""
    x = tl.load(x_ptr + rows * x_stride + cols, mask, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + rows * D + cols, mask, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
    return x


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_forward_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    sum_ptr,
    scale_ptr,
    num_rows,
    x_stride,
    eps,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row_R = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    rows, here = row_R[:, None], (row_R < num_rows)[:, None]
    square = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    x = square.to(x_ptr.dtype.element_ty)
    for start in range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)[None, :]
        x = _row(x_ptr, residual_ptr, rows, x_stride, cols, here & (cols < D), D)
        square += x.to(tl.float32) * x.to(tl.float32)
    scale_R = tl.rsqrt(tl.sum(square, 1) / D + eps)
    tl.store(scale_ptr + row_R, scale_R, row_R < num_rows)
    for start in range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)[None, :]
        mask = here & (cols < D)
        if BLOCK_D < D:  # else the row is in registers
            x = _row(x_ptr, residual_ptr, rows, x_stride, cols, mask, D)
        if residual_ptr is not None:
            tl.store(sum_ptr + rows * D + cols, x, mask)
        weight = tl.load(weight_ptr + cols, cols < D, other=0.0).to(tl.float32)
        tl.store(y_ptr + rows * D + cols, (x.to(tl.float32) * scale_R[:, None] * weight).to(x.dtype), mask)


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_backward_kernel(
    grad_ptr,
    grad_sum_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    dx_ptr,
    dw_ptr,
    num_rows,
    x_stride,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows that fit in registers, so that all is read once: dx = s g w - x s² mean(s g w x), dw = sum over R of s g x.

    Of several orders of the same lines this one needs the fewest registers; rows of 16,384 just fit.
    """
    cols = tl.arange(0, BLOCK_D)[None, :]
    dw = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for first in range(tl.program_id(0) * BLOCK_R, num_rows, tl.num_programs(0) * BLOCK_R):
        row_R = tl.cast(first, tl.int64) + tl.arange(0, BLOCK_R)
        rows, mask = row_R[:, None], (row_R < num_rows)[:, None] & (cols < D)
        scale = tl.load(scale_ptr + row_R, row_R < num_rows, other=0.0)[:, None]
        x = tl.load(x_ptr + rows * x_stride + cols, mask, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + rows * D + cols, mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + cols, cols < D, other=0.0).to(tl.float32)
        grad *= scale
        dw += grad * x
        grad *= weight
        x *= tl.sum(grad * x, 1, keep_dims=True) / D * scale * scale
        grad -= x
        if grad_sum_ptr is not None:
            grad += tl.load(grad_sum_ptr + rows * D + cols, mask, other=0.0).to(tl.float32)
        tl.store(dx_ptr + rows * D + cols, grad.to(dx_ptr.dtype.element_ty), mask)
    tl.store(dw_ptr + tl.program_id(0) * D + cols, tl.sum(dw, 0, keep_dims=True), cols < D)


@triton.jit
def _x_and_grad(x_ptr, grad_ptr, row, x_stride, cols, scale, D: tl.constexpr):
    x = tl.load(x_ptr + row * x_stride + cols, cols < D, other=0.0).to(tl.float32)
    return x, tl.load(grad_ptr + row * D + cols, cols < D, other=0.0).to(tl.float32) * scale


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_backward_wide_kernel(
    grad_ptr,
    grad_sum_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    dx_ptr,
    dw_ptr,
    num_rows,
    x_stride,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Longer rows, a block of features at a time: for the mean of a row, for dx, and for dw."""
    for at in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(at, tl.int64)
        scale = tl.load(scale_ptr + row)
        dot = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, D, BLOCK_D):
            cols = start + tl.arange(0, BLOCK_D)
            x, grad = _x_and_grad(x_ptr, grad_ptr, row, x_stride, cols, scale, D)
            dot += grad * tl.load(weight_ptr + cols, cols < D, other=0.0).to(tl.float32) * x
        mean = tl.sum(dot) / D * scale * scale
        for start in range(0, D, BLOCK_D):
            cols = start + tl.arange(0, BLOCK_D)
            x, grad = _x_and_grad(x_ptr, grad_ptr, row, x_stride, cols, scale, D)
            dx = grad * tl.load(weight_ptr + cols, cols < D, other=0.0).to(tl.float32) - x * mean
            if grad_sum_ptr is not None:
                dx += tl.load(grad_sum_ptr + row * D + cols, cols < D, other=0.0).to(tl.float32)
            tl.store(dx_ptr + row * D + cols, dx.to(dx_ptr.dtype.element_ty), cols < D)
    for start in range(0, D, BLOCK_D):
        cols = start + tl.arange(0, BLOCK_D)
        dw = tl.zeros([BLOCK_D], tl.float32)
        for at in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            row = tl.cast(at, tl.int64)
            x, grad = _x_and_grad(x_ptr, grad_ptr, row, x_stride, cols, tl.load(scale_ptr + row), D)
            dw += grad * x
        tl.store(dw_ptr + tl.program_id(0) * D + cols, dw, cols < D)


@triton.jit(do_not_specialize=["num_parts"])
def sum_of_parts_kernel(part_ptr, out_ptr, num_parts, D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr):
    """Sum over P of [P, D], always in the same order, rounded once."""
    cols = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    total = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    for first in range(0, num_parts, BLOCK_P):
        part = first + tl.arange(0, BLOCK_P)[:, None]
        total += tl.load(part_ptr + part * D + cols, (part < num_parts) & (cols < D), other=0.0)
    tl.store(out_ptr + cols, tl.sum(total, 0, keep_dims=True).to(out_ptr.dtype.element_ty), cols < D)


def _num_warps(block_features: int) -> int:
    """16 elements of a tile a thread, so that two programs share a multiprocessor; 32 in the longest rows."""
    return min(max(_TILE, block_features) // 512, 16)


def _forward(x: Tensor, residual: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y and x + residual, both in the shape of x, and one over the root mean square of each row."""
    x_RD = feature_rows(x)
    num_rows, features = x_RD.shape
    y = x.new_empty(x.shape)
    total = y if residual is None else x.new_empty(x.shape)
    scale_R = x.new_empty(num_rows, dtype=torch.float32)
    block_rows, block_features = tile(features, _WIDEST, _TILE)
    rms_norm_forward_kernel[(cdiv(num_rows, block_rows),)](
        x_RD,
        None if residual is None else residual.contiguous(),
        weight_D.contiguous(),
        y,
        total,
        scale_R,
        num_rows,
        x_RD.stride(0),
        eps,
        D=features,
        BLOCK_R=block_rows,
        BLOCK_D=block_features,
        num_warps=_num_warps(block_features),
    )
    return y, total, scale_R


def _new_like(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _new_scale(x: Tensor) -> Tensor:
    return x.new_empty(prod(x.shape[:-1]), dtype=torch.float32)


@operator(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    fake=lambda x, weight, eps: (_new_like(x), _new_scale(x)),
)
def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y, and one over the root mean square of each row for the backward pass."""
    y, _, scale_R = _forward(x, None, weight_D, eps)
    return y, scale_R


@operator(
    "rms_norm_residual(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    fake=lambda x, residual, weight, eps: (_new_like(x), _new_like(x), _new_scale(x)),
)
def rms_norm_residual(x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y of x + residual, that sum, and one over the root mean square of each of its rows."""
    return _forward(x, residual, weight_D, eps)


@operator(
    "rms_norm_backward(Tensor grad, Tensor? grad_sum, Tensor x, Tensor weight, Tensor scale) -> (Tensor, Tensor)",
    fake=lambda grad, grad_sum, x, weight, scale: (_new_like(x), _new_like(weight)),
)
def rms_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, x: Tensor, weight_D: Tensor, scale_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x, which is the sum where there is a residual, and of the weight.

    Args:
        grad_sum: of the sum from elsewhere, added to that of x.
    """
    x_RD = feature_rows(x)
    num_rows, features = x_RD.shape
    dx, dw_D = x.new_empty(x.shape), weight_D.new_empty(features)
    block_rows, block_features = tile(features, _WIDEST, _TILE)
    wide = block_features < features
    programs = max(min(num_rows if wide else cdiv(num_rows, block_rows), _PROGRAMS), 1)
    dw_PD = x.new_empty(programs, features, dtype=torch.float32)
    kernel: Any = rms_norm_backward_wide_kernel if wide else rms_norm_backward_kernel
    kernel[(programs,)](
        grad.contiguous(),
        None if grad_sum is None else grad_sum.contiguous(),
        x_RD,
        weight_D.contiguous(),
        scale_R,
        dx,
        dw_PD,
        num_rows,
        x_RD.stride(0),
        D=features,
        **({} if wide else {"BLOCK_R": block_rows}),
        BLOCK_D=block_features,
        num_warps=_num_warps(block_features),
    )
    sum_of_parts_kernel[(cdiv(features, _SUM_BLOCKS["BLOCK_D"]),)](dw_PD, dw_D, programs, D=features, **_SUM_BLOCKS)
    return dx, dw_D


def _compile_cases() -> tuple[CompileCase, ...]:
    cases = []
    for features in (128, 2048, 7168, _WIDEST, 2 * _WIDEST):
        block_rows, block_features = tile(features, _WIDEST, _TILE)
        wide = block_features < features
        sizes = {"D": features, "BLOCK_R": block_rows, "BLOCK_D": block_features}
        backward = rms_norm_backward_wide_kernel if wide else rms_norm_backward_kernel
        backward_sizes = {"D": features, "BLOCK_D": block_features} if wide else sizes
        for residual in (False, True):
            name = f"rms_norm{'_residual' * residual} {{}} bf16 D{features}"
            for kernel, constants, types, absent in (
                (rms_norm_forward_kernel, sizes, {"scale_ptr": "*fp32", "eps": "fp32"}, "residual_ptr"),
                (backward, backward_sizes, {"scale_ptr": "*fp32", "dw_ptr": "*fp32"}, "grad_sum_ptr"),
            ):
                cases.append(
                    compile_case(
                        name.format("forward" if kernel is rms_norm_forward_kernel else "backward"),
                        kernel,
                        constants if residual else {**constants, absent: None},
                        types=types,
                        num_warps=_num_warps(block_features),
                    )
                )
    sizes = {"D": 7168, **_SUM_BLOCKS}
    cases.append(
        compile_case("rms_norm sum of parts", sum_of_parts_kernel, sizes, types={"part_ptr": "*fp32"}, num_warps=4)
    )
    return tuple(cases)


COMPILE_CASES = in_all_dtypes(_compile_cases())
