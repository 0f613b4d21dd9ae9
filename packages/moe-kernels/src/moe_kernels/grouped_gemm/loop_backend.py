"""The `loop` backend: one `torch.mm` per expert. It works in every dtype and on every device, and it is the oracle of
the others.

The host reads the offsets in every call, which synchronises it with an accelerator. Shape legend as in `api`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_kernels.errors import MoeKernelsError
from moe_kernels.grouped_gemm.api import GROUPED_GEMM_INTERFACE_VERSION, GroupedGemm, KernelSpec


class LoopGroupedGemm:
    """`GroupedGemm` as a loop; products are formed in the dtype of the rows, or in that of `main_grad_EKN`."""

    def forward(self, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        return loop_mm(x_RK, w_EKN, offsets_E, x_RK.dtype)

    def dgrad(self, grad_RN: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        return loop_mm(grad_RN, w_EKN.transpose(1, 2), offsets_E, grad_RN.dtype)

    def wgrad(
        self,
        x_RK: Tensor,
        grad_RN: Tensor,
        offsets_E: Tensor,
        *,
        main_grad_EKN: Tensor | None = None,
        accumulate_E: Tensor | None = None,
    ) -> Tensor:
        if main_grad_EKN is None:
            return loop_wgrad(x_RK, grad_RN, offsets_E, x_RK.dtype)
        loop_wgrad_add_(main_grad_EKN, x_RK, grad_RN, offsets_E, accumulate_E, main_grad_EKN.dtype)
        return main_grad_EKN


def loop_mm(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor, product_dtype: torch.dtype) -> Tensor:
    """y[r] = x[r] @ w[e(r)], multiplied in `product_dtype`; zero after the last offset."""
    sizes = _group_sizes(x_RK, offsets_E)
    y_RN = x_RK.new_empty(x_RK.shape[0], w_EKN.shape[2])
    *y_groups, tail = torch.split(y_RN, sizes)
    for x, w, y, size in zip(torch.split(x_RK, sizes)[:-1], w_EKN.unbind(0), y_groups, sizes[:-1], strict=True):
        if size:
            _mm(x, w, y, product_dtype)
    if sizes[-1]:
        tail.zero_()
    return y_RN


def loop_wgrad(x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor, product_dtype: torch.dtype) -> Tensor:
    """w[e] = x_e.T @ grad_e, multiplied in `product_dtype`; zero for experts without rows."""
    sizes = _group_sizes(x_RK, offsets_E)
    w_EKN = x_RK.new_empty(len(sizes) - 1, x_RK.shape[1], grad_RN.shape[1])
    x_groups, grad_groups = torch.split(x_RK.t(), sizes, 1)[:-1], torch.split(grad_RN, sizes)[:-1]
    for x, grad, w, size in zip(x_groups, grad_groups, w_EKN.unbind(0), sizes[:-1], strict=True):
        if size:
            _mm(x, grad, w, product_dtype)
        else:
            w.zero_()
    return w_EKN


def loop_wgrad_add_(
    main_grad_EKN: Tensor,
    x_RK: Tensor,
    grad_RN: Tensor,
    offsets_E: Tensor,
    accumulate_E: Tensor | None,
    product_dtype: torch.dtype,
) -> None:
    """main_grad[e] += x_e.T @ grad_e for the experts that `accumulate_E` names, in the dtype of `main_grad`."""
    sizes = _group_sizes(x_RK, offsets_E)
    wanted: Sequence[bool] = [True] * (len(sizes) - 1) if accumulate_E is None else accumulate_E.tolist()
    x_groups, grad_groups = torch.split(x_RK, sizes)[:-1], torch.split(grad_RN, sizes)[:-1]
    for x, grad, main_grad, want in zip(x_groups, grad_groups, main_grad_EKN.unbind(0), wanted, strict=True):
        if want and x.shape[0]:
            factors = x.t().to(product_dtype), grad.to(product_dtype)
            if product_dtype == main_grad.dtype:
                main_grad.addmm_(*factors)
            else:
                main_grad.add_(torch.mm(*factors))


def _mm(a: Tensor, b: Tensor, out: Tensor, product_dtype: torch.dtype) -> None:
    if out.dtype == product_dtype:
        torch.mm(a, b, out=out)
    else:
        out.copy_(torch.mm(a.to(product_dtype), b.to(product_dtype)))


def _group_sizes(x_RK: Tensor, offsets_E: Tensor) -> list[int]:
    """Rows of every group, and last the rows that belong to none."""
    ends = offsets_E.tolist()
    sizes = [end - start for start, end in zip([0, *ends], [*ends, x_RK.shape[0]], strict=True)]
    if min(sizes) < 0:
        raise MoeKernelsError(
            f"offsets must not decrease and must end at or before the {x_RK.shape[0]} rows, got {ends}"
        )
    return sizes


def _available() -> str | None:
    return None


def _supports(dtype: torch.dtype, device_type: str) -> str | None:
    return None if dtype.is_floating_point else f"grouped products are of floating-point rows, not {dtype}"


def _build() -> GroupedGemm:
    return LoopGroupedGemm()


SPEC = KernelSpec(
    name="loop",
    interface_version=GROUPED_GEMM_INTERFACE_VERSION,
    available=_available,
    supports=_supports,
    build=_build,
)
