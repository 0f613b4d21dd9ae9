"""How the grouped GEMM kernels cut products into tiles: data, and the rule for shapes that are not listed.

Chosen from what the compiler says for sm_90 and sm_100 (no spills, registers, shared memory), and not measured on a GPU
yet: `benchmarks/tune_grouped_gemm.py` does that, and prints lines for `TUNED`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Operation = Literal["forward", "dgrad", "wgrad"]
Loads = Literal["pointers", "descriptors"]


@dataclass(frozen=True, kw_only=True)
class TileConfig:
    """One program computes `block_m` times `block_n` outputs, and sums `block_sum` products at a time.

    Attributes:
        block_m: rows of a tile; in `wgrad` of the weight, which are its input features.
        block_n: columns of a tile.
        block_sum: inner features per step; in `wgrad` rows.
        band: tiles that are walked down before the next column, so that both operands are found in the L2 cache.
        num_warps, num_stages: as Triton calls them.
        loads: `pointers`, asynchronous copies of 16 bytes, or `descriptors`, whole tiles by the tensor memory
            accelerator, which forward and dgrad have for aligned operands on sm_90 and later.
    """

    block_m: int
    block_n: int
    block_sum: int
    band: int = 8
    num_warps: int = 8
    num_stages: int = 4
    loads: Loads = "pointers"


# Small, so that the little tensors of a test have several tiles in every direction.
INTERPRETED = TileConfig(block_m=16, block_n=32, block_sum=16, band=2)

# Most products per loaded byte that 8 warps have registers for (118 to 246 of 255); four stages take 192 KiB of shared
# memory, of 227.
_WIDE = TileConfig(block_m=128, block_n=256, block_sum=64)
# With few rows for each expert half of such a tile would be empty.
_LOW = replace(_WIDE, block_m=64)
# As wide with few columns, where half of it would be empty.
_NARROW = replace(_WIDE, block_n=128)
# fp32 is multiplied in full precision by the ordinary units, out of registers, which a wider tile exhausts.
_FULL_PRECISION = TileConfig(block_m=64, block_n=64, block_sum=16, num_warps=4, num_stages=2)
# Without alignment every element is loaded alone, and its address takes registers.
_UNALIGNED = TileConfig(block_m=64, block_n=64, block_sum=32, num_stages=2)

_FEW_ROWS, _FEW_COLUMNS = 64, 128
# What Triton asks of a length before it takes rows for aligned.
_ALIGNMENT = 16

# K, N of the weights: DeepSeek-V3, Qwen3-235B-A22B and Qwen3-30B-A3B, gate and up, then down.
_MODELS = ((7168, 4096), (2048, 7168), (4096, 3072), (1536, 4096), (2048, 1536), (768, 2048))

# By operation, bits of the dtype, K and N of the weight.
TUNED: Mapping[tuple[Operation, int, int, int], TileConfig] = {
    (operation, bits, k, n): config
    for operation in ("forward", "dgrad", "wgrad")
    for bits, config in ((16, _WIDE), (32, _FULL_PRECISION))
    for k, n in _MODELS
}


def tile_config(operation: Operation, bits: int, k: int, n: int, rows_per_expert: int) -> TileConfig:
    """The tiles for a product.

    Args:
        operation: which product.
        bits: of the dtype of the operands.
        k, n: the weight's features, in `dgrad` too.
        rows_per_expert: R / E; the true counts are on the device.
    """
    if k % _ALIGNMENT or n % _ALIGNMENT:
        return _UNALIGNED if bits == 16 else replace(_UNALIGNED, block_sum=16)
    if bits == 32:
        return TUNED.get((operation, bits, k, n), _FULL_PRECISION)
    if operation != "wgrad" and rows_per_expert <= _FEW_ROWS:
        return _LOW
    narrow = (k if operation == "dgrad" else n) <= _FEW_COLUMNS
    return TUNED.get((operation, bits, k, n), _NARROW if narrow else _WIDE)
