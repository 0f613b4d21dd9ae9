"""`GroupedGemm`: one matrix product per expert over rows that are sorted by expert; the seam of its backends.

Shape legend: R rows (sorted by expert), E experts here, K inner features, N output features.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

GROUPED_GEMM_INTERFACE_VERSION = 1


class GroupedGemm(Protocol):
    """The three products of a grouped linear map. Group e owns rows `offsets[e-1]:offsets[e]`.

    `offsets_E` is int32, inclusive (`offsets[e] = sum(counts[:e+1])`), on the device of the rows; no host
    synchronisation is required of a caller. Rows after the last offset belong to no expert: their output and their
    input gradient are zero. Empty groups, and zero rows in all, are ordinary cases.
    """

    def forward(self, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        """y_RN, `y[r] = x[r] @ w[e(r)]`, in the dtype of x."""

    def dgrad(self, grad_RN: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        """Gradient for x, [R, K]: `grad[r] @ w[e(r)].T`."""

    def wgrad(
        self,
        x_RK: Tensor,
        grad_RN: Tensor,
        offsets_E: Tensor,
        *,
        main_grad_EKN: Tensor | None = None,
        accumulate_E: Tensor | None = None,
    ) -> Tensor:
        """Gradient for w, [E, K, N]; zero for experts without rows.

        With `main_grad_EKN` the gradient is added to it in its own dtype, in place, and it is returned;
        `accumulate_E` (bool, default all True) leaves out experts whose gradient belongs elsewhere.
        """


@dataclass(frozen=True, kw_only=True)
class KernelSpec:
    """Plug-in record of a grouped GEMM backend (entry-point group `moe_kernels.grouped_gemm`).

    Attributes:
        name: its name in configuration.
        interface_version: the version of this seam that it was written for.
        available: None if it can run on this machine, else the reason.
        supports: (dtype, device type) to None if it can run on such tensors, else the reason.
        build: makes the backend; called once.
    """

    name: str
    interface_version: int
    available: Callable[[], str | None]
    supports: Callable[[torch.dtype, str], str | None]
    build: Callable[[], GroupedGemm]
