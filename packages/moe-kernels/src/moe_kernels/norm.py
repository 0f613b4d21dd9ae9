"""RMSNorm (arXiv 1910.07467) with statistics in the internal dtype.

Shape legend: R rows (all leading dims), D features.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moe_kernels.dtypes import internal_dtype
from moe_kernels.errors import MoeKernelsError
from moe_kernels.implementation import uses_triton
from moe_kernels.passes import row_slices


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dim, in the dtype of x, rounded once.

    x is [.., D], weight [D]. Kept for the backward pass: x, the weight and one number per row.

    Raises:
        MoeKernelsError: the weight has another number of features.
    """
    _check_weight(x, weight)
    return _rms_norm(x, weight, eps)


def rms_norm_residual(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm(x + residual)` and x + residual, which is rounded to the dtype of x before it is normalised.

    x and residual are [.., D], weight [D]. Kept for the backward pass: the sum, the weight and one number per row.

    Raises:
        MoeKernelsError: x and residual differ in shape or dtype, or the weight has another number of features.
    """
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise MoeKernelsError(
            f"a residual {tuple(residual.shape)} in {residual.dtype} cannot be added to {tuple(x.shape)} in {x.dtype}; "
            "both must have the same shape and dtype"
        )
    _check_weight(x, weight)
    if uses_triton(x):
        return _rms_norm_residual(x, residual, weight, eps)
    total = x + residual
    return _rms_norm(total, weight, eps), total


def _check_weight(x: Tensor, weight: Tensor) -> None:
    # A kernel would read what is not there.
    if weight.shape[0] != x.shape[-1]:
        raise MoeKernelsError(f"a weight {tuple(weight.shape)} cannot scale rows of {x.shape[-1]} features")


class RMSNorm(nn.Module):
    """`rms_norm` and `rms_norm_residual` with a weight of its own, which is uninitialised.

    Args:
        features: D.
        eps: added to the mean square.
        dtype, device: of the weight.
    """

    def __init__(
        self,
        features: int,
        eps: float,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(features, dtype=dtype, device=device))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """`rms_norm` of x, or with a residual `rms_norm_residual`, which also returns the sum."""
        if residual is None:
            return rms_norm(x, self.weight, self.eps)
        return rms_norm_residual(x, residual, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        y: Tensor
        ctx.triton = uses_triton(x)
        if ctx.triton:
            from moe_kernels.triton_kernels import norm as kernels

            y, scale_R = kernels.rms_norm(x, weight_D, eps)
            ctx.save_for_backward(x, weight_D, scale_R)
            return y
        internal = internal_dtype(x.dtype)
        x_RD = x.reshape(-1, x.shape[-1])
        # Returned itself: fully_shard takes no module whose output is a view.
        y = x.new_empty(x.shape)
        y_RD = y.view(x_RD.shape)
        # One over the root mean square of each row.
        scale_R1 = x_RD.new_empty(x_RD.shape[0], 1, dtype=internal)
        w_D, eps_1 = weight_D.to(internal), scale_R1.new_full((1,), eps)
        for rows in row_slices(x_RD):
            row = x_RD[rows].to(internal)
            scale = torch.linalg.vector_norm(row, dim=-1, keepdim=True, out=scale_R1[rows])
            torch.addcmul(eps_1, scale, scale, value=1 / x.shape[-1], out=scale).rsqrt_()
            torch.mul(row * scale, w_D, out=y_RD[rows])
        ctx.save_for_backward(x_RD, weight_D, scale_R1)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        if ctx.triton:
            from moe_kernels.triton_kernels import norm as kernels

            dx, dw_D = kernels.rms_norm_backward(grad, None, *ctx.saved_tensors)
            return dx, dw_D, None
        x_RD, weight_D, scale_R1 = ctx.saved_tensors
        internal = internal_dtype(x_RD.dtype)
        grad_RD = grad.reshape(x_RD.shape)
        dx_RD = x_RD.new_empty(x_RD.shape)
        w_D = weight_D.to(internal)
        dw_D = torch.zeros_like(w_D)
        for rows in row_slices(x_RD):
            row, g, scale = x_RD[rows].to(internal), grad_RD[rows].to(internal), scale_R1[rows]
            g_row = g * row
            # dx = s g w - s³ x (g·w·x) / D and dw = sum over rows of s g x: both sums are matrix-vector products.
            dot = torch.mv(g_row, w_D)[:, None]
            dw_D.addmv_(g_row.t(), scale[:, 0])
            dot.mul_(scale).mul_(scale).mul_(scale).div_(-x_RD.shape[1])
            torch.addcmul(torch.mul(g, w_D, out=g_row).mul_(scale), row, dot, out=dx_RD[rows])
        return dx_RD.view(grad.shape), dw_D.to(weight_D.dtype), None


class _RMSNormResidual(torch.autograd.Function):
    """By a kernel; without one it is composed of an addition and `_RMSNorm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from moe_kernels.triton_kernels import norm as kernels

        ctx.set_materialize_grads(False)
        y, total, scale_R = kernels.rms_norm_residual(x, residual, weight_D, eps)
        ctx.save_for_backward(total, weight_D, scale_R)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_sum: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if grad is None:
            return grad_sum, grad_sum, None, None
        from moe_kernels.triton_kernels import norm as kernels

        dx, dw_D = kernels.rms_norm_backward(grad, grad_sum, *ctx.saved_tensors)
        return dx, dx, dw_D, None


_rms_norm: Callable[..., Tensor] = _RMSNorm.apply
_rms_norm_residual: Callable[..., tuple[Tensor, Tensor]] = _RMSNormResidual.apply
