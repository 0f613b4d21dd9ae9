"""`grouped_gemm`: the three products of a backend as one differentiable map. Shape legend as in `api`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_kernels.grouped_gemm.api import GroupedGemm


class LaterGradients(Protocol):
    """Keeps gradients of weights for a pass of their own, which schedules that split the backward have."""

    def later(self, weight: Tensor, gradient: Callable[[], Tensor]) -> bool:
        """Called in a backward: whether this gradient is left to later, and need not be given now.

        `gradient` is called at most once, where autograd records nothing (`torch.no_grad`).
        """


_later: ContextVar[LaterGradients | None] = ContextVar("moe_kernels_later_gradients", default=None)


@contextmanager
def weight_gradients_to(later: LaterGradients) -> Iterator[None]:
    """Grouped products whose forward runs inside ask `later` before they compute the gradient of their weight."""
    token = _later.set(later)
    try:
        yield
    finally:
        _later.reset(token)


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
        ctx.backend, ctx.later = backend, _later.get()
        # The weight itself, not what is saved: its graph leads to the parameter.
        ctx.weight = w_EKN if needs_w and ctx.later is not None else None
        return backend.forward(x_RK, w_EKN, offsets_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x_RK, w_EKN, offsets_E = ctx.saved_tensors
        # The gradient of a sum has strides of zero, which kernels refuse; without elements it passes for contiguous.
        grad_RN = grad_RN.contiguous() if grad_RN.numel() else grad_RN.new_empty(grad_RN.shape)
        needs_x, needs_w = ctx.needs_input_grad[:2]

        def weight_gradient() -> Tensor:
            gradient: Tensor = ctx.backend.wgrad(x_RK, grad_RN, offsets_E)
            return gradient

        if needs_w and ctx.later is not None and ctx.later.later(ctx.weight, weight_gradient):
            needs_w = False
        return (
            ctx.backend.dgrad(grad_RN, w_EKN, offsets_E) if needs_x else None,
            weight_gradient() if needs_w else None,
            None,
            None,
        )


_grouped_gemm: Callable[..., Tensor] = _GroupedGemm.apply
