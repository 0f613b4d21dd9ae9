"""Cross-entropy per target: one streaming pass over the logits in each direction, and none of them in fp32.

Shape legend: T tokens, V vocabulary.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from moe_kernels.triton_kernels.compiled import CompileCase
from moe_kernels.triton_kernels.memory_bound import compile_case, feature_rows, in_all_dtypes
from moe_kernels.triton_kernels.operator import operator

# Logits that a program takes at a time, 16 a thread.
_WIDEST = 4096
_NUM_WARPS = 8

_LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def cross_entropy_forward_kernel(
    logits_ptr,
    targets_ptr,
    valid_ptr,
    loss_ptr,
    max_ptr,
    sum_ptr,
    logits_stride,
    smoothing,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SMOOTH: tl.constexpr,
):
    """Loss, and the maximum and sum of exponentials which it and the gradient are made of.

    A target outside the vocabulary, which only a CPU can refuse, has a loss of NaN and such a gradient.
    """
    token = tl.program_id(0).to(tl.int64)
    logits_ptr += token * logits_stride
    valid = True
    if valid_ptr is not None:
        valid = tl.load(valid_ptr + token) != 0
    # Finite, so that a block of -inf adds zero and not NaN.
    highest = tl.where(valid, tl.full([], _LOWEST, tl.float32), 0.0)
    total_V = tl.zeros([BLOCK_V], tl.float32)
    logit_sum = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, V, BLOCK_V):
        mask = valid & (start + tl.arange(0, BLOCK_V) < V)
        logit = tl.load(logits_ptr + start + tl.arange(0, BLOCK_V), mask, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(logit))
        total_V = total_V * tl.exp(highest - higher) + tl.exp(logit - higher)
        highest = higher
        if SMOOTH:
            logit_sum += tl.where(mask, logit, 0.0)
    total = tl.where(valid, tl.sum(total_V), 1.0)
    target = tl.load(targets_ptr + token)
    inside = valid & (target >= 0) & (target < V)
    wanted = tl.load(logits_ptr + target, inside, other=float("nan")).to(tl.float32)
    loss = highest - wanted
    if SMOOTH:
        loss += smoothing * (wanted - tl.sum(logit_sum) / V)
    tl.store(loss_ptr + token, tl.where(valid, loss + tl.log(total), 0.0))
    tl.store(max_ptr + token, highest)
    tl.store(sum_ptr + token, total)


@triton.jit
def cross_entropy_backward_kernel(
    grad_ptr,
    logits_ptr,
    targets_ptr,
    valid_ptr,
    max_ptr,
    sum_ptr,
    dlogits_ptr,
    logits_stride,
    smoothing,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    valid = True
    if valid_ptr is not None:
        valid = tl.load(valid_ptr + token) != 0
    col = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    target = tl.load(targets_ptr + token)
    scale = tl.load(grad_ptr + token)
    scale = tl.where((target >= 0) & (target < V), scale, float("nan"))
    logit = tl.load(logits_ptr + token * logits_stride + col, valid & (col < V), other=0.0).to(tl.float32)
    grad = tl.exp(logit - tl.load(max_ptr + token)) / tl.load(sum_ptr + token) - smoothing / V
    grad = (grad - tl.where(col == target, 1.0 - smoothing, 0.0)) * scale
    grad = tl.where(valid, grad, 0.0)
    tl.store(dlogits_ptr + token * V + col, grad.to(dlogits_ptr.dtype.element_ty), col < V)


def _fake_forward(
    logits: Tensor, targets: Tensor, valid: Tensor | None, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    loss, highest, total = (logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(3))
    return loss, highest, total


@operator(
    "cross_entropy(Tensor logits, Tensor targets, Tensor? valid, float smoothing) -> (Tensor, Tensor, Tensor)",
    fake=_fake_forward,
)
def cross_entropy(
    logits_TV: Tensor, targets_T: Tensor, valid_T: Tensor | None, smoothing: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each token, and the maximum of its logits and the sum of their exponentials below it."""
    logits_TV = feature_rows(logits_TV)
    loss_T, max_T, sum_T = _fake_forward(logits_TV, targets_T, valid_T, smoothing)
    vocabulary = logits_TV.shape[1]
    cross_entropy_forward_kernel[(logits_TV.shape[0],)](
        logits_TV,
        targets_T.contiguous(),
        None if valid_T is None else valid_T.contiguous(),
        loss_T,
        max_T,
        sum_T,
        logits_TV.stride(0),
        smoothing,
        V=vocabulary,
        BLOCK_V=min(next_power_of_2(vocabulary), _WIDEST),
        SMOOTH=smoothing != 0,
        num_warps=_NUM_WARPS,
    )
    return loss_T, max_T, sum_T


@operator(
    "cross_entropy_backward(Tensor grad, Tensor logits, Tensor targets, Tensor? valid, Tensor max, Tensor sum, "
    "float smoothing) -> Tensor",
    fake=lambda grad, logits, targets, valid, max, sum, smoothing: logits.new_empty(logits.shape),  # noqa: A006
)
def cross_entropy_backward(
    grad_T: Tensor,
    logits_TV: Tensor,
    targets_T: Tensor,
    valid_T: Tensor | None,
    max_T: Tensor,
    sum_T: Tensor,
    smoothing: float,
) -> Tensor:
    """Gradient of the logits, in their dtype."""
    logits_TV = feature_rows(logits_TV)
    tokens, vocabulary = logits_TV.shape
    dlogits_TV = logits_TV.new_empty(logits_TV.shape)
    width = min(next_power_of_2(vocabulary), _WIDEST)
    cross_entropy_backward_kernel[(tokens, cdiv(vocabulary, width))](
        grad_T.contiguous(),
        logits_TV,
        targets_T.contiguous(),
        None if valid_T is None else valid_T.contiguous(),
        max_T,
        sum_T,
        dlogits_TV,
        logits_TV.stride(0),
        smoothing,
        V=vocabulary,
        BLOCK_V=width,
        num_warps=_NUM_WARPS,
    )
    return dlogits_TV


def _compile_cases() -> tuple[CompileCase, ...]:
    types = dict.fromkeys(("loss_ptr", "max_ptr", "sum_ptr", "grad_ptr"), "*fp32") | {
        "targets_ptr": "*i64",
        "valid_ptr": "*i1",
        "smoothing": "fp32",
    }
    cases = []
    for vocabulary in (129_280, 151_936):
        for masked, smooth in ((True, False), (False, True)):
            sizes: dict[str, Any] = {"V": vocabulary, "BLOCK_V": _WIDEST} | ({} if masked else {"valid_ptr": None})
            name = f"cross_entropy {{}} bf16 V{vocabulary}{' masked' * masked}{' smoothed' * smooth}"
            forward, backward = cross_entropy_forward_kernel, cross_entropy_backward_kernel
            for direction, kernel, constants in (
                ("forward", forward, sizes | {"SMOOTH": smooth}),
                ("backward", backward, sizes),
            ):
                cases.append(compile_case(name.format(direction), kernel, constants, types=types, num_warps=_NUM_WARPS))
    return tuple(cases)


COMPILE_CASES = in_all_dtypes(_compile_cases())
