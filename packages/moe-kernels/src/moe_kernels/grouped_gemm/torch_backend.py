"""The `torch` backend: `torch.nn.functional.grouped_mm` behind operators of our own, which take any K and N, keep the
contract after the last offset, and trace, fake and count flops in every dtype.

On an accelerator we read nothing on the host; torch does, and loops, in other dtypes than bf16 and on GPUs other than
sm_90 and sm_100. On a CPU the offsets are in its memory. Shape legend as in `api`.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels._torch_compat import is_observed
from moe_kernels.dtypes import internal_dtype
from moe_kernels.errors import MoeKernelsError
from moe_kernels.grouped_gemm.api import GROUPED_GEMM_INTERFACE_VERSION, GroupedGemm, KernelSpec
from moe_kernels.grouped_gemm.loop_backend import loop_mm, loop_wgrad, loop_wgrad_add_
from moe_kernels.grouped_gemm.shapes import count_flops, fake_mm, fake_wgrad, fake_wgrad_add_

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT_BYTES = 16
# Operands and results of so many elements are converted at once for products in another dtype: 1.2 to 2 times as fast
# as group by group. With twice as many it may be half as fast, when every call writes to new pages (CPU, one thread).
_FEW_ELEMENTS = 2**18

# Defined through the library and not with `custom_op`: for 8 and 32 small groups a call takes 50 and 124 us against 98
# and 214, and `F.grouped_mm` itself 35 and 109 (CPU, one thread). They need no autograd formula, because `grouped_gemm`
# is the differentiable function.
torch.library.define("moe_kernels::grouped_mm", "(Tensor x_RK, Tensor w_EKN, Tensor offsets_E) -> Tensor")
torch.library.define("moe_kernels::grouped_mm_wgrad", "(Tensor x_RK, Tensor grad_RN, Tensor offsets_E) -> Tensor")
torch.library.define(
    "moe_kernels::grouped_mm_wgrad_add_",
    "(Tensor(a!) main_grad_EKN, Tensor x_RK, Tensor grad_RN, Tensor offsets_E, Tensor? accumulate_E) -> ()",
)
_grouped_mm = torch.ops.moe_kernels.grouped_mm.default
_grouped_mm_wgrad = torch.ops.moe_kernels.grouped_mm_wgrad.default
_grouped_mm_wgrad_add_ = torch.ops.moe_kernels.grouped_mm_wgrad_add_.default


class TorchGroupedGemm:
    """`GroupedGemm` over the operators of this module."""

    def forward(self, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        product = _compute if _needs_no_operator(x_RK, w_EKN) else _grouped_mm
        y_RN: Tensor = product(x_RK, w_EKN, offsets_E)
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
        if main_grad_EKN is None:
            product = _compute_wgrad if _needs_no_operator(x_RK, grad_RN) else _grouped_mm_wgrad
            grad_EKN: Tensor = product(x_RK, grad_RN, offsets_E)
            return grad_EKN
        _grouped_mm_wgrad_add_(main_grad_EKN, x_RK, grad_RN, offsets_E, accumulate_E)
        return main_grad_EKN


def _needs_no_operator(*tensors: Tensor) -> bool:
    """Whether nobody sees the operator of a product but the dispatcher, to which it is worth 50 us: on a CPU, where
    autograd, compiler and modes are out of the way."""
    plain = all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in tensors)
    return plain and not (torch.is_grad_enabled() or torch.compiler.is_compiling() or is_observed())


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype to multiply in: the internal one on a CPU without AVX-512, elsewhere that of x.

    Without AVX-512 `mm` in bf16 or fp16 runs at 1 to 20 GF/s on one thread, and at 56 to 64 with each group converted
    to fp32 and back. With AVX-512 bf16 runs at 480 GF/s as it is.
    """
    internal = internal_dtype(x.dtype)
    return internal if internal != x.dtype and x.device.type == "cpu" and not _wide_cpu() else x.dtype


@cache
def _wide_cpu() -> bool:
    return torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "NO AVX", "AVX2")


def aligned_mm(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """`F.grouped_mm` for any K and N, and zero after the last offset, where it leaves memory as it was."""
    y_RN = F.grouped_mm(_pad_to_alignment(x_RK, 1), _pad_to_alignment(w_EKN, 2), offs=offsets_E)
    if y_RN.shape[1] != w_EKN.shape[2]:
        y_RN = y_RN[:, : w_EKN.shape[2]].contiguous()
    if y_RN.device.type != "cpu":
        return y_RN.masked_fill_(torch.arange(y_RN.shape[0], device=y_RN.device)[:, None] >= offsets_E[-1], 0)
    if (end := _last_row(x_RK, offsets_E)) < y_RN.shape[0]:
        y_RN[end:].zero_()
    return y_RN


def aligned_wgrad(x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """`F.grouped_mm` of x.T and grad for any K and N."""
    if x_RK.device.type == "cpu":
        _last_row(x_RK, offsets_E)
    w_EKN = F.grouped_mm(_pad_to_alignment(x_RK, 1).t(), _pad_to_alignment(grad_RN, 1), offs=offsets_E)
    k, n = x_RK.shape[1], grad_RN.shape[1]
    return w_EKN if w_EKN.shape[1:] == (k, n) else w_EKN[:, :k, :n].contiguous()


def _last_row(x: Tensor, offsets_E: Tensor) -> int:
    end: int = offsets_E.tolist()[-1]  # a third of the time of int(offsets_E[-1])
    if end > x.shape[0]:
        # F.grouped_mm would leave out the missing rows in silence.
        raise MoeKernelsError(f"the last offset is {end}, but there are only {x.shape[0]} rows")
    return end


def _pad_to_alignment(x: Tensor, dims: int) -> Tensor:
    """Zeros after the last dims, so that all of them begin at multiples of 16 bytes, as `F.grouped_mm` demands."""
    multiple = _ALIGNMENT_BYTES // x.element_size()
    if x.shape[-1] % multiple == 0 == x.shape[-dims] % multiple:
        return x
    return F.pad(x, [pad for dim in range(1, dims + 1) for pad in (0, -x.shape[-dim] % multiple)])


def _compute(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    dtype = product_dtype(x_RK)
    if dtype == x_RK.dtype:
        return aligned_mm(x_RK, w_EKN, offsets_E)
    if x_RK.numel() + w_EKN.numel() + x_RK.shape[0] * w_EKN.shape[2] <= _FEW_ELEMENTS:
        return aligned_mm(x_RK.to(dtype), w_EKN.to(dtype), offsets_E).to(x_RK.dtype)
    return loop_mm(x_RK, w_EKN, offsets_E, dtype)


def _compute_wgrad(x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor) -> Tensor:
    dtype = product_dtype(x_RK)
    if dtype == x_RK.dtype:
        return aligned_wgrad(x_RK, grad_RN, offsets_E)
    if x_RK.numel() + grad_RN.numel() + offsets_E.numel() * x_RK.shape[1] * grad_RN.shape[1] <= _FEW_ELEMENTS:
        return aligned_wgrad(x_RK.to(dtype), grad_RN.to(dtype), offsets_E).to(x_RK.dtype)
    return loop_wgrad(x_RK, grad_RN, offsets_E, dtype)


def _compute_wgrad_add_(
    main_grad_EKN: Tensor, x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor, accumulate_E: Tensor | None
) -> None:
    if x_RK.device.type == "cpu":
        # No gradient of all experts in between: mm adds to each expert's main gradient directly.
        loop_wgrad_add_(main_grad_EKN, x_RK, grad_RN, offsets_E, accumulate_E, product_dtype(x_RK))
        return
    w_EKN = aligned_wgrad(x_RK, grad_RN, offsets_E)
    if accumulate_E is not None:
        w_EKN.masked_fill_(~accumulate_E[:, None, None], 0)
    main_grad_EKN.add_(w_EKN)


torch.library.impl("moe_kernels::grouped_mm", "CompositeExplicitAutograd", _compute)
torch.library.impl("moe_kernels::grouped_mm_wgrad", "CompositeExplicitAutograd", _compute_wgrad)
torch.library.impl("moe_kernels::grouped_mm_wgrad_add_", "CompositeExplicitAutograd", _compute_wgrad_add_)


torch.library.register_fake("moe_kernels::grouped_mm", fake_mm)
torch.library.register_fake("moe_kernels::grouped_mm_wgrad", fake_wgrad)
torch.library.register_fake("moe_kernels::grouped_mm_wgrad_add_", fake_wgrad_add_)

count_flops(
    torch.ops.moe_kernels.grouped_mm,
    torch.ops.moe_kernels.grouped_mm_wgrad,
    torch.ops.moe_kernels.grouped_mm_wgrad_add_,
)


def _available() -> str | None:
    return None if hasattr(F, "grouped_mm") else f"torch {torch.__version__} has no nn.functional.grouped_mm"


def _supports(dtype: torch.dtype, device_type: str) -> str | None:
    if device_type not in ("cpu", "cuda"):
        return f"torch.nn.functional.grouped_mm is for cpu and cuda tensors, not {device_type}"
    if dtype not in _DTYPES:
        return f"torch.nn.functional.grouped_mm takes float32, bfloat16 and float16, not {dtype}"
    return None


def _build() -> GroupedGemm:
    return TorchGroupedGemm()


SPEC = KernelSpec(
    name="torch",
    interface_version=GROUPED_GEMM_INTERFACE_VERSION,
    available=_available,
    supports=_supports,
    build=_build,
)
