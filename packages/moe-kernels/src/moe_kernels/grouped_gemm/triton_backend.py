"""The `triton` backend: kernels of our own, which read the offsets on the device for every dtype, take any K and N, and
add the gradient of the weights to a main gradient without a copy of it in between.

Triton is imported when a product is first computed. Shape legend as in `api`.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moe_kernels.dtypes import internal_dtype
from moe_kernels.grouped_gemm.api import GROUPED_GEMM_INTERFACE_VERSION, GroupedGemm, KernelSpec
from moe_kernels.grouped_gemm.shapes import count_flops, fake_mm, fake_wgrad, fake_wgrad_add_
from moe_kernels.implementation import TRITON_DTYPES, triton_unavailable
from moe_kernels.triton_kernels.grouped_gemm_configs import INTERPRETED, Operation, TileConfig, tile_config
from moe_kernels.triton_kernels.operator import operator

# Programs of the interpreter, which run one after another; three of them walk more than one tile each, as on a device.
_INTERPRETED_PROGRAMS = 3
_DESCRIPTOR_ALIGNMENT_BYTES = 16
_OLDEST = (9, 0)


class TritonGroupedGemm:
    """`GroupedGemm` over the operators of this module. Weights may have any strides; one should be 1."""

    def forward(self, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        y_RN: Tensor = _mm(x_RK, w_EKN, offsets_E)
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
            grad_EKN: Tensor = _wgrad(x_RK, grad_RN, offsets_E)
            return grad_EKN
        _wgrad_add_(main_grad_EKN, x_RK, grad_RN, offsets_E, accumulate_E)
        return main_grad_EKN


@operator("triton_grouped_mm(Tensor x_RK, Tensor w_EKN, Tensor offsets_E) -> Tensor", fake_mm)
def _mm(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    dtype = x_RK.dtype
    x_RK, w_EKN = _computable(_with_contiguous_rows(x_RK)), _computable(w_EKN)
    y_RN = x_RK.new_empty(x_RK.shape[0], w_EKN.shape[2])
    if y_RN.numel():
        _launch_mm(x_RK, w_EKN, offsets_E.contiguous(), y_RN)
    return y_RN.to(dtype)


@operator("triton_grouped_mm_wgrad(Tensor x_RK, Tensor grad_RN, Tensor offsets_E) -> Tensor", fake_wgrad)
def _wgrad(x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor) -> Tensor:
    dtype = x_RK.dtype
    x_RK, grad_RN = (_computable(_with_contiguous_rows(rows)) for rows in (x_RK, grad_RN))
    grad_EKN = x_RK.new_empty(offsets_E.shape[0], x_RK.shape[1], grad_RN.shape[1])
    _launch_wgrad(grad_EKN, x_RK, grad_RN, offsets_E, None, add=False)
    return grad_EKN.to(dtype)


@operator(
    "triton_grouped_mm_wgrad_add_(Tensor(a!) main_grad_EKN, Tensor x_RK, Tensor grad_RN, Tensor offsets_E, "
    "Tensor? accumulate_E) -> ()",
    fake_wgrad_add_,
)
def _wgrad_add_(
    main_grad_EKN: Tensor, x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor, accumulate_E: Tensor | None
) -> None:
    x_RK, grad_RN = (_computable(_with_contiguous_rows(rows)) for rows in (x_RK, grad_RN))
    sum_EKN = _computable(main_grad_EKN)
    _launch_wgrad(sum_EKN, x_RK, grad_RN, offsets_E, accumulate_E, add=True)
    if sum_EKN is not main_grad_EKN:
        main_grad_EKN.copy_(sum_EKN)


count_flops(
    torch.ops.moe_kernels.triton_grouped_mm,
    torch.ops.moe_kernels.triton_grouped_mm_wgrad,
    torch.ops.moe_kernels.triton_grouped_mm_wgrad_add_,
)


def _launch_mm(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor, y_RN: Tensor) -> None:
    from moe_kernels.triton_kernels.grouped_gemm import grouped_mm_descriptor_kernel, grouped_mm_kernel

    (rows, k), (experts, _, n) = x_RK.shape, w_EKN.shape
    # A transposed view is how a weight is read for the gradient of its input.
    transposed = w_EKN.stride(2) != 1
    tiles = _tiles("dgrad", x_RK, n, k, experts) if transposed else _tiles("forward", x_RK, k, n, experts)
    # Every group has at most one tile that is not full.
    most_tiles = (_tiles_in(rows, tiles.block_m) + experts) * _tiles_in(n, tiles.block_n)
    grid = (min(_programs(x_RK), most_tiles),)
    shared = {
        "NUM_EXPERTS": experts,
        "GROUPS": 1 << experts.bit_length(),  # a power of two above E: the experts, and the rows of none
        "M_BLOCK": tiles.block_m,
        "N_BLOCK": tiles.block_n,
        "S_BLOCK": tiles.block_sum,
        "BAND": tiles.band,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    stored = w_EKN.transpose(1, 2) if transposed else w_EKN
    if tiles.loads == "descriptors" and _describable(x_RK) and _describable(stored):
        block = [1, tiles.block_n, tiles.block_sum] if transposed else [1, tiles.block_sum, tiles.block_n]
        descriptors = (_descriptor(x_RK, [tiles.block_m, tiles.block_sum]), _descriptor(stored, block))
        grouped_mm_descriptor_kernel[grid](*descriptors, y_RN, offsets_E, rows, k, n, TRANSPOSED=transposed, **shared)
        return
    grouped_mm_kernel[grid](
        x_RK,
        w_EKN,
        y_RN,
        offsets_E,
        rows,
        k,
        n,
        x_RK.stride(0),
        *w_EKN.stride(),
        EVEN_K=k % tiles.block_sum == 0,
        EVEN_N=n % tiles.block_n == 0,
        **shared,
    )


def _launch_wgrad(
    out_EKN: Tensor, x_RK: Tensor, grad_RN: Tensor, offsets_E: Tensor, accumulate_E: Tensor | None, *, add: bool
) -> None:
    from moe_kernels.triton_kernels.grouped_gemm import grouped_wgrad_kernel

    if not out_EKN.numel():
        return
    experts, k, n = out_EKN.shape
    tiles = _tiles("wgrad", x_RK, k, n, experts)
    grid = (experts * _tiles_in(k, tiles.block_m) * _tiles_in(n, tiles.block_n),)
    grouped_wgrad_kernel[grid](
        x_RK,
        grad_RN,
        out_EKN,
        offsets_E.contiguous(),
        None if accumulate_E is None else accumulate_E.contiguous(),
        x_RK.shape[0],
        k,
        n,
        x_RK.stride(0),
        grad_RN.stride(0),
        *out_EKN.stride(),
        ADD=add,
        M_BLOCK=tiles.block_m,
        N_BLOCK=tiles.block_n,
        S_BLOCK=tiles.block_sum,
        BAND=tiles.band,
        EVEN_K=k % tiles.block_m == 0,
        EVEN_N=n % tiles.block_n == 0,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _tiles(operation: Operation, x: Tensor, k: int, n: int, experts: int) -> TileConfig:
    if not x.is_cuda:
        return INTERPRETED
    return tile_config(operation, 8 * x.element_size(), k, n, x.shape[0] // max(experts, 1))


def _tiles_in(length: int, block: int) -> int:
    return -(-length // block)


def _programs(x: Tensor) -> int:
    return _multiprocessors(x.device) if x.is_cuda else _INTERPRETED_PROGRAMS


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _with_contiguous_rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _computable(x: Tensor) -> Tensor:
    """x, and for the interpreter an fp32 copy of bf16, which it would multiply as integers and truncate."""
    return x if x.is_cuda or x.dtype != torch.bfloat16 else x.to(internal_dtype(x.dtype))


def _describable(x: Tensor) -> bool:
    """Whether the tensor memory accelerator reads it: aligned to 16 bytes, last dim contiguous."""
    strides = (stride * x.element_size() for stride in x.stride()[:-1])
    aligned = all(bytes_ % _DESCRIPTOR_ALIGNMENT_BYTES == 0 for bytes_ in (x.data_ptr(), *strides))
    return aligned and x.stride(-1) == 1 and x.numel() > 0


def _descriptor(x: Tensor, block: list[int]) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def _available() -> str | None:
    if not torch.cuda.is_available():
        return triton_unavailable("cpu")
    if (capability := torch.cuda.get_device_capability()) < _OLDEST:
        return f"its tiles are made for compute capability {_OLDEST} and later, not for {capability}"
    return triton_unavailable("cuda")


def _supports(dtype: torch.dtype, device_type: str) -> str | None:
    if dtype not in TRITON_DTYPES:
        return f"kernels are for float32, bfloat16 and float16, not {dtype}"
    return triton_unavailable(device_type)


def _build() -> GroupedGemm:
    return TritonGroupedGemm()


SPEC = KernelSpec(
    name="triton",
    interface_version=GROUPED_GEMM_INTERFACE_VERSION,
    available=_available,
    supports=_supports,
    build=_build,
)
