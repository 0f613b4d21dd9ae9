"""Grouped GEMM: one matrix product per expert over rows sorted by expert; the seam, its backends and the choice."""

from moe_kernels.grouped_gemm.api import (
    GROUPED_GEMM_INTERFACE_VERSION as GROUPED_GEMM_INTERFACE_VERSION,
    GroupedGemm as GroupedGemm,
    KernelSpec as KernelSpec,
)
from moe_kernels.grouped_gemm.autograd import grouped_gemm as grouped_gemm
from moe_kernels.grouped_gemm.select import GROUPED_GEMM as GROUPED_GEMM, select_grouped_gemm as select_grouped_gemm
