"""Where blocks of state with a common scale lie, so that no rank ever has a part of one.

A block is up to 256 values along one dim of the whole parameter, the longest that no axis of the plan splits: what
ranks of `tp`, `etp` and `ep` hold then ends where blocks end, in every layout. Engines that cut further do so along
another dim, or between blocks (`data_parallel.sections`). So values and scales depend on the parameter alone, and a
checkpoint is read into any layout as it is: codes in the shape of the parameter, scales with one entry a block.

Shape legend: A, C elements before and behind the dim of blocks, B along it, N blocks along it.
"""

from collections.abc import Iterator
from math import prod

from torch import Tensor

from moe_memory.optim.decay import is_decayed
from moe_parallel import Box, ShardSpec

BLOCK = 256


def block_dim(spec: ShardSpec) -> int | None:
    """The dim along which blocks lie; None where there are none: vectors, and what the plan splits along every dim."""
    if not is_decayed(spec):
        return None
    split = {dim for _, dim in spec.placements}
    free = [dim for dim in range(len(spec.shape)) if dim not in split and spec.shape[dim] > 1]
    # The last of several.
    return max(free, key=lambda dim: (spec.shape[dim], dim), default=None)


def view_by_block(shape: tuple[int, ...], dim: int) -> tuple[int, int, int]:
    """A, B, C of a parameter."""
    return prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :])


def scale_shape(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    """Shape of the scales of a parameter, or of a part of it that begins with a block."""
    return (*shape[:dim], -(-shape[dim] // BLOCK), *shape[dim + 1 :])


def scale_box(box: Box, dim: int) -> Box:
    """The part of the scales that belongs to a part of a parameter."""
    offset = list(box.offset)
    offset[dim] //= BLOCK
    return Box(tuple(offset), scale_shape(box.shape, dim))


def by_block(x_ABC: Tensor, scale_ANC: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of values [A, N, values of a block, C] and scales [A, N, 1, C]: of whole blocks, then of the rest."""
    a, b, c = x_ABC.shape
    whole = b // BLOCK
    if whole:
        yield x_ABC[:, : whole * BLOCK].view(a, whole, BLOCK, c), scale_ANC[:, :whole].unsqueeze(2)
    if b % BLOCK:
        yield x_ABC[:, whole * BLOCK :].unsqueeze(1), scale_ANC[:, whole:].unsqueeze(2)
