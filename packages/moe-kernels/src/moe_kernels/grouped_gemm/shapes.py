"""What the operators of every backend have in common: results without values, and floating-point operations.

Every row is counted, those after the last offset too: a formula sees shapes only. Shape legend as in `api`.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula


def fake_mm(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    return x_RK.new_empty(x_RK.shape[0], w_EKN.shape[2])


def fake_wgrad(x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor) -> Tensor:
    return x_RK.new_empty(offsets_E.shape[0], x_RK.shape[1], grad_RN.shape[1])


def fake_wgrad_add_(
    main_grad_EKN: Tensor, x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor, accumulate_E: Tensor | None
) -> None:
    return None


def count_flops(mm: Any, wgrad: Any, wgrad_add_: Any) -> None:
    """Register the formulas of the three operators (packets, such as `torch.ops.moe_kernels.grouped_mm`)."""
    register_flop_formula(mm)(_mm_flops)
    register_flop_formula(wgrad)(_wgrad_flops)
    register_flop_formula(wgrad_add_)(_wgrad_add_flops)


def _mm_flops(x_shape: torch.Size, w_shape: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * w_shape[2]


def _wgrad_flops(x_shape: torch.Size, grad_shape: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * x_shape[0] * x_shape[1] * grad_shape[1]


def _wgrad_add_flops(
    main_grad_shape: torch.Size, x_shape: torch.Size, grad_shape: torch.Size, *_: Any, **__: Any
) -> int:
    return _wgrad_flops(x_shape, grad_shape)
