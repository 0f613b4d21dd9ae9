"""A grouped GEMM as a third party would write it: `acme-padded`, in one file, on public names only.

Groups are padded with zeros to the longest, which the host reads, so that one batched product computes all of them.
Shape legend: R rows, E experts, K inner features, N output features, M rows of the longest group.
"""

import torch
from torch import Tensor

from moe_kernels import KernelSpec


class AcmeGroupedGemm:
    """One `torch.bmm`, in every floating-point dtype and on every device."""

    def forward(self, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        row_EM, valid_EM = padded(offsets_E)
        y_RN = x_RK.new_zeros(x_RK.shape[0], w_EKN.shape[2])
        y_RN[row_EM[valid_EM]] = torch.bmm(taken(x_RK, row_EM, valid_EM), w_EKN)[valid_EM]
        return y_RN

    def dgrad(self, grad_RN: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        return self.forward(grad_RN, w_EKN.transpose(1, 2), offsets_E)

    def wgrad(
        self,
        x_RK: Tensor,
        grad_RN: Tensor,
        offsets_E: Tensor,
        *,
        main_grad_EKN: Tensor | None = None,
        accumulate_E: Tensor | None = None,
    ) -> Tensor:
        row_EM, valid_EM = padded(offsets_E)
        if accumulate_E is not None:
            valid_EM = valid_EM & accumulate_E[:, None]
        x_EMK, grad_EMN = taken(x_RK, row_EM, valid_EM), taken(grad_RN, row_EM, valid_EM)
        if main_grad_EKN is None:
            return torch.bmm(x_EMK.transpose(1, 2), grad_EMN)
        dtype = main_grad_EKN.dtype
        return main_grad_EKN.baddbmm_(x_EMK.transpose(1, 2).to(dtype), grad_EMN.to(dtype))


def padded(offsets_E: Tensor) -> tuple[Tensor, Tensor]:
    """Row of every place [E, M], and whether the place is a row."""
    size_E = torch.diff(offsets_E, prepend=offsets_E.new_zeros(1))
    place_M = torch.arange(int(size_E.max()), device=offsets_E.device)
    return (offsets_E - size_E)[:, None] + place_M, place_M < size_E[:, None]


def taken(x_RF: Tensor, row_EM: Tensor, valid_EM: Tensor) -> Tensor:
    """Rows in their places, [E, M, F], and zeros elsewhere."""
    x_EMF = x_RF.new_zeros(*row_EM.shape, x_RF.shape[1])
    x_EMF[valid_EM] = x_RF[row_EM[valid_EM]]
    return x_EMF


SPEC = KernelSpec(
    name="acme-padded",
    interface_version=1,
    available=lambda: None,
    supports=lambda dtype, device_type: None if dtype.is_floating_point else f"rows are of floating point, not {dtype}",
    build=AcmeGroupedGemm,
)
