"""The fastest tiles of the Triton grouped GEMM on this GPU, for DeepSeek-V3 and Qwen3.

    python packages/moe-kernels/benchmarks/tune_grouped_gemm.py [--rows 512] [--dtype bfloat16]

Times every candidate for each product of each linear map, and prints the fastest as lines for `TUNED` in
`triton_kernels/grouped_gemm_configs.py`, with its TFLOP/s and its speed beside the tiles that are listed there now.
Candidates that do not fit the GPU's registers or shared memory are left out.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from statistics import median
from unittest.mock import patch

import torch
from triton.runtime.errors import OutOfResources

from moe_kernels.grouped_gemm import triton_backend
from moe_kernels.triton_kernels.grouped_gemm_configs import TUNED, Operation, TileConfig, tile_config

EXPERTS = 64
REPEATS = 20


def candidates(operation: Operation, bits: int) -> Iterator[TileConfig]:
    sums, stages = ((64, 128), (2, 3, 4, 5)) if bits == 16 else ((16, 32), (2, 3))
    loads = ("pointers",) if operation == "wgrad" or bits == 32 else ("pointers", "descriptors")
    for block_m, block_n, block_sum, num_warps, num_stages, load in product(
        (64, 128, 256), (64, 128, 256), sums, (4, 8), stages, loads
    ):
        if block_m * block_n <= 128 * 256:
            yield TileConfig(
                block_m=block_m,
                block_n=block_n,
                block_sum=block_sum,
                num_warps=num_warps,
                num_stages=num_stages,
                loads=load,
            )


def milliseconds(call: Callable[[], object]) -> float:
    """Median of a call whose inputs are too large for the L2 cache."""
    times = []
    for _ in range(REPEATS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return median(times[3:])


def with_tiles(tiles: TileConfig, call: Callable[[], object]) -> float | None:
    """Milliseconds with these tiles, or None if they do not fit."""
    with patch.object(triton_backend, "_tiles", lambda *_: tiles):
        try:
            return milliseconds(call)
        except OutOfResources:
            return None


def tune(operation: Operation, k: int, n: int, rows: int, dtype: torch.dtype) -> str:
    """The line for `TUNED`."""
    backend = triton_backend.TritonGroupedGemm()
    x_RK, grad_RN = (torch.randn(EXPERTS * rows, features, device="cuda").to(dtype) for features in (k, n))
    w_EKN = torch.randn(EXPERTS, k, n, device="cuda").to(dtype)
    offsets_E = torch.arange(1, EXPERTS + 1, device="cuda", dtype=torch.int32) * rows
    call: Callable[[], object] = {
        "forward": lambda: backend.forward(x_RK, w_EKN, offsets_E),
        "dgrad": lambda: backend.dgrad(grad_RN, w_EKN, offsets_E),
        "wgrad": lambda: backend.wgrad(x_RK, grad_RN, offsets_E),
    }[operation]
    bits = 8 * dtype.itemsize
    now = with_tiles(tile_config(operation, bits, k, n, rows), call)
    best, tiles = float("inf"), None
    for candidate in candidates(operation, bits):
        found = with_tiles(candidate, call)
        if found is not None and found < best:
            best, tiles = found, candidate
    if tiles is not None:
        for band in (1, 2, 4, 16):
            found = with_tiles(replace(tiles, band=band), call)
            if found is not None and found < best:
                best, tiles = found, replace(tiles, band=band)
    speed = 2 * EXPERTS * rows * k * n / best / 1e9
    beside = "" if now is None else f", {now / best:.2f} times as fast as now"
    return f"    {(operation, bits, k, n)}: {tiles},  # {speed:.0f} TFLOP/s{beside}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="rows per expert")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("tiles are tuned on a GPU, and there is none", file=sys.stderr)
        return 1
    dtype = getattr(torch, options.dtype)
    print(f"# {torch.cuda.get_device_name()}, {EXPERTS} experts, {options.rows} rows per expert, {options.dtype}")
    for operation, bits, k, n in TUNED:
        if bits == 8 * dtype.itemsize:
            print(tune(operation, k, n, options.rows, dtype), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
