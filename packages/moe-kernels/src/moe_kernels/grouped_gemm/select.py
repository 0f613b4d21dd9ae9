"""Which grouped GEMM backend computes: the registry of the installed ones, and the choice."""

import torch

from moe_kernels.grouped_gemm.api import GROUPED_GEMM_INTERFACE_VERSION, GroupedGemm, KernelSpec
from moe_kernels.registry import PluginError, Registry

GROUPED_GEMM = Registry("moe_kernels.grouped_gemm", "grouped GEMM backend", KernelSpec, GROUPED_GEMM_INTERFACE_VERSION)

# Best first. A backend from elsewhere is chosen by its name. So is `triton` until it has been measured on a GPU: it is
# to come before `torch` for what `benchmarks/grouped_gemm.py --backends torch triton` shows to be faster there. In fp16
# and fp32 it alone leaves the host unsynchronised. With CPU tensors it runs in Triton's interpreter, for tests.
AUTO_ORDER = ("torch", "loop")


def select_grouped_gemm(name: str, dtype: torch.dtype, device_type: str) -> GroupedGemm:
    """The backend of that name for tensors of that dtype and device type, or with `auto` the first that takes them.

    An explicit name never falls back to another. `auto` logs one line: what was chosen, and why the better ones were
    not.

    Raises:
        PluginError: unknown name, or the backend cannot run here or on such tensors, with the reason.
    """
    if name == "auto":
        return GROUPED_GEMM.first(AUTO_ORDER, lambda spec: spec.supports(dtype, device_type)).build()
    spec = GROUPED_GEMM.get_available(name)
    reason = spec.supports(dtype, device_type)
    if reason is not None:
        raise PluginError(f"grouped GEMM backend {name!r} cannot compute in {dtype} on {device_type}: {reason}")
    return spec.build()
