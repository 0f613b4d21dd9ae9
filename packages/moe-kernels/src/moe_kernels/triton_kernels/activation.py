"""The gated activation times a probability per row; the backward pass recomputes all but its input.

Shape legend: R rows, F features of an expert; h_RF2 is [R, 2F], gate and up side by side.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv

from moe_kernels.triton_kernels.compiled import CompileCase
from moe_kernels.triton_kernels.memory_bound import compile_case, feature_rows, in_all_dtypes, tile
from moe_kernels.triton_kernels.operator import operator

# Features of a row that a program takes at a time, and elements of its tile: eight a thread, of four tensors backward.
_WIDEST, _TILE = 1024, 1024
_NUM_WARPS = 4

_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY_AT_0 = tl.constexpr(0.3989422804014327)


@triton.jit
def _value_and_slope(gate, KIND: tl.constexpr):
    if KIND == "silu":
        sigmoid = tl.sigmoid(gate)
        value = gate * sigmoid
        slope = value + sigmoid * (1.0 - value)
    else:
        cdf = 0.5 + 0.5 * tl.erf(gate * _SQRT_HALF)
        value = gate * cdf
        slope = cdf + gate * _DENSITY_AT_0 * tl.exp(-0.5 * gate * gate)
    return value, slope


@triton.jit
def _rows_of(pid, live_ptr, num_rows, BLOCK_R: tl.constexpr):
    """Rows of a program, which of them exist, and which of these are not to be zero."""
    row_R = pid.to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    here_R = row_R < num_rows
    live_R = here_R
    if live_ptr is not None:
        live_R = here_R & (row_R < tl.load(live_ptr))
    return row_R, here_R, live_R


@triton.jit(do_not_specialize=["num_rows"])
def gated_activation_forward_kernel(
    h_ptr,
    probs_ptr,
    live_ptr,
    a_ptr,
    num_rows,
    h_stride,
    F: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    row_R, here_R, live_R = _rows_of(tl.program_id(0), live_ptr, num_rows, BLOCK_R)
    rows, here, live = row_R[:, None], here_R[:, None], live_R[:, None]
    cols = tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F)[None, :]
    # What is not loaded is zero, and so is what is made of it.
    gate = tl.load(h_ptr + rows * h_stride + cols, live & (cols < F), other=0.0).to(tl.float32)
    up = tl.load(h_ptr + rows * h_stride + F + cols, live & (cols < F), other=0.0).to(tl.float32)
    value, _ = _value_and_slope(gate, KIND)
    a = value * up
    if probs_ptr is not None:
        a *= tl.load(probs_ptr + row_R, live_R, other=0.0).to(tl.float32)[:, None]
    tl.store(a_ptr + rows * F + cols, a.to(a_ptr.dtype.element_ty), here & (cols < F))


@triton.jit(do_not_specialize=["num_rows"])
def gated_activation_backward_kernel(
    grad_ptr,
    h_ptr,
    probs_ptr,
    live_ptr,
    dh_ptr,
    dprobs_ptr,
    num_rows,
    h_stride,
    F: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    """A program has all features of its rows, so that the gradient of p is one sum in one order."""
    row_R, here_R, live_R = _rows_of(tl.program_id(0), live_ptr, num_rows, BLOCK_R)
    rows, here, live = row_R[:, None], here_R[:, None], live_R[:, None]
    if probs_ptr is not None:
        probs = tl.load(probs_ptr + row_R, live_R, other=0.0).to(tl.float32)[:, None]
    dprobs = tl.zeros([BLOCK_R, BLOCK_F], tl.float32)
    for start in range(0, F, BLOCK_F):
        cols = start + tl.arange(0, BLOCK_F)[None, :]
        gate = tl.load(h_ptr + rows * h_stride + cols, live & (cols < F), other=0.0).to(tl.float32)
        up = tl.load(h_ptr + rows * h_stride + F + cols, live & (cols < F), other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + rows * F + cols, live & (cols < F), other=0.0).to(tl.float32)
        value, slope = _value_and_slope(gate, KIND)
        if probs_ptr is not None:
            dprobs += grad * value * up
            grad *= probs
        dgate, dup = grad * up * slope, grad * value
        tl.store(dh_ptr + rows * (2 * F) + cols, dgate.to(dh_ptr.dtype.element_ty), here & (cols < F))
        tl.store(dh_ptr + rows * (2 * F) + F + cols, dup.to(dh_ptr.dtype.element_ty), here & (cols < F))
    if probs_ptr is not None:
        tl.store(dprobs_ptr + row_R, tl.sum(dprobs, 1).to(dprobs_ptr.dtype.element_ty), here_R)


@operator(
    "gated_activation(Tensor h, Tensor? probs, Tensor? rows, str kind) -> Tensor",
    fake=lambda h, probs, rows, kind: h.new_empty(h.shape[0], h.shape[1] // 2),
)
def gated_activation(h_RF2: Tensor, probs_R: Tensor | None, rows: Tensor | None, kind: str) -> Tensor:
    """a [R, F]; zero from row `rows[0]` on."""
    h_RF2 = feature_rows(h_RF2)
    num_rows, features = h_RF2.shape[0], h_RF2.shape[1] // 2
    a_RF = h_RF2.new_empty(num_rows, features)
    block_rows, block_features = tile(features, _WIDEST, _TILE)
    gated_activation_forward_kernel[(cdiv(num_rows, block_rows), cdiv(features, block_features))](
        h_RF2,
        None if probs_R is None else probs_R.contiguous(),
        rows,
        a_RF,
        num_rows,
        h_RF2.stride(0),
        F=features,
        KIND=kind,
        BLOCK_R=block_rows,
        BLOCK_F=block_features,
        num_warps=_NUM_WARPS,
    )
    return a_RF


def _fake_backward(
    grad: Tensor, h: Tensor, probs: Tensor | None, rows: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), h.new_empty(0) if probs is None else probs.new_empty(probs.shape)


@operator(
    "gated_activation_backward(Tensor grad, Tensor h, Tensor? probs, Tensor? rows, str kind) -> (Tensor, Tensor)",
    fake=_fake_backward,
)
def gated_activation_backward(
    grad_RF: Tensor, h_RF2: Tensor, probs_R: Tensor | None, rows: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    """Gradients of h, and of the probabilities in their dtype (empty without them)."""
    h_RF2 = feature_rows(h_RF2)
    num_rows, features = grad_RF.shape
    dh_RF2 = h_RF2.new_empty(h_RF2.shape)
    dprobs_R = h_RF2.new_empty(0) if probs_R is None else probs_R.new_empty(num_rows)
    block_rows, block_features = tile(features, _WIDEST, _TILE)
    gated_activation_backward_kernel[(cdiv(num_rows, block_rows),)](
        grad_RF.contiguous(),
        h_RF2,
        None if probs_R is None else probs_R.contiguous(),
        rows,
        dh_RF2,
        dprobs_R,
        num_rows,
        h_RF2.stride(0),
        F=features,
        KIND=kind,
        BLOCK_R=block_rows,
        BLOCK_F=block_features,
        num_warps=_NUM_WARPS,
    )
    return dh_RF2, dprobs_R


def _compile_cases() -> tuple[CompileCase, ...]:
    kernels = {"forward": gated_activation_forward_kernel, "backward": gated_activation_backward_kernel}
    types = {"probs_ptr": "*fp32", "dprobs_ptr": "*fp32", "live_ptr": "*i32"}
    cases = []
    # Experts of Qwen3-30B-A3B and DeepSeek-V3, and the dense layers of the latter, which have no probabilities.
    for features, weighted, kind in (
        (768, True, "silu"),
        (2048, True, "silu"),
        (2048, True, "gelu"),
        (18_432, False, "silu"),
    ):
        block_rows, block_features = tile(features, _WIDEST, _TILE)
        constants: dict[str, Any] = {"F": features, "KIND": kind, "BLOCK_R": block_rows, "BLOCK_F": block_features}
        if not weighted:
            constants |= {"probs_ptr": None, "live_ptr": None}
        for direction, kernel in kernels.items():
            name = f"gated_activation {direction} bf16 F{features} {kind}{' probabilities' * weighted}"
            cases.append(compile_case(name, kernel, constants, types=types, num_warps=_NUM_WARPS))
    return tuple(cases)


COMPILE_CASES = in_all_dtypes(_compile_cases())
