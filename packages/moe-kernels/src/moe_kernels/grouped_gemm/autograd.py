"""`grouped_gemm`: the three products of a backend as one differentiable map. Shape legend as in `api`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_kernels.grouped_gemm.api import GroupedGemm


def grouped_gemm(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor, backend: GroupedGemm) -> Tensor:
    """y_RN with `y[r] = x[r] @ w[e(r)]`, differentiable in x and w; the host is synchronised where the backend does.

    Rows after the last offset give zero, in gradients too. Without any row the result still hangs on the graph and the
    weights get zero gradients.
    """
    return _grouped_gemm(x_RK, w_EKN, offsets_E, backend)


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor, backend: GroupedGemm) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x_RK if needs_w else None, w_EKN if needs_x else None, offsets_E)
        ctx.backend = backend
        return backend.forward(x_RK, w_EKN, offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_RK, w_EKN, offsets_E = ctx.saved_tensors
        # The gradient of a sum has strides of zero, which kernels refuse; without elements it passes for contiguous.
        grad_RN = grad_RN.contiguous() if grad_RN.numel() else grad_RN.new_empty(grad_RN.shape)
        needs_x, needs_w = ctx.needs_input_grad[:2]
        return (
            ctx.backend.dgrad(grad_RN, w_EKN, offsets_E) if needs_x else None,
            ctx.backend.wgrad(x_RK, grad_RN, offsets_E) if needs_w else None,
            None,
            None,
        )


_grouped_gemm: Callable[..., Tensor] = _GroupedGemm.apply
