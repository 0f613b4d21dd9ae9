"""`Buffer`: master weights of some parameters in one flat tensor, and the chunks in which they are updated.

Shape legend: A, C elements before and behind the dim of blocks, B along it (`optim.blocks`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from moe_memory.optim.blocks import BLOCK, block_dim, view_by_block
from moe_memory.optim.rules import UpdateRule
from moe_parallel import Box, ShardSpec

# Elements that are in the dtype of the arithmetic at once: a few tensors of this size fit into a processor's cache.
CHUNK_ELEMENTS = 2**18
# What does not fill a vector of 64 bytes torch's fused AdamW rounds differently (`data_parallel.sections`).
VECTOR = 16


@dataclass(frozen=True, kw_only=True)
class Part:
    """Where the part of a parameter lies in a buffer.

    Attributes:
        spec: of the parameter.
        box: in the coordinates of the whole.
        start: number of the first element in the buffer; the rest follows row by row.
    """

    spec: ShardSpec
    box: Box
    start: int

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def elements(self) -> int:
        return prod(self.box.shape)


@dataclass(frozen=True)
class Chunk:
    """Elements `start` to `stop` of a part, which are [A, B, C] with whole blocks of the rows `rows_A` and `rows_B`."""

    part: Part
    start: int
    stop: int
    shape_ABC: tuple[int, int, int]
    rows_A: slice
    rows_B: slice

    def of(self, flat: Tensor) -> Tensor:
        """The elements, in a tensor that is laid out as the buffer."""
        return flat[self.part.start + self.start : self.part.start + self.stop]


@dataclass(kw_only=True)
class Buffer:
    """Master weights.

    Attributes:
        weights: flat and contiguous; updated in place.
        parts: of parameters that follow one rule; what lies between them is zero.
        rule: of all of them.
        compute: dtype of the weights that the model computes with.
        may_leave: whether the model computes with other tensors, so that the memory of these may be free between
            updates.
    """

    weights: Tensor
    parts: list[Part]
    rule: UpdateRule
    compute: torch.dtype
    may_leave: bool = False
    _chunks: list[Chunk] = field(default_factory=list, init=False)

    def chunks(self) -> list[Chunk]:
        """Every element once, in order."""
        if not self._chunks:
            self._chunks = [chunk for part in self.parts for chunk in _cut(part, self.rule.has_blocks)]
        return self._chunks


def _cut(part: Part, has_blocks: bool) -> Iterator[Chunk]:
    if part.elements == 0:
        return
    dim = block_dim(part.spec) if has_blocks else None
    if dim is None:
        yield from _runs(part, (part.elements, 1, 1), CHUNK_ELEMENTS)
        return
    a, b, c = view_by_block(part.box.shape, dim)
    rows = CHUNK_ELEMENTS // (b * c)
    if rows:
        yield from _runs(part, (a, b, c), rows)
        return
    size = max(CHUNK_ELEMENTS // (BLOCK * c), 1) * BLOCK
    for row in range(a):
        for first in range(0, b, size):
            last = min(first + size, b)
            begin = row * b * c
            shape = (1, last - first, c)
            yield Chunk(part, begin + first * c, begin + last * c, shape, slice(row, row + 1), slice(first, last))


def _runs(part: Part, shape_ABC: tuple[int, int, int], rows: int) -> Iterator[Chunk]:
    """So many rows of dim A at once."""
    a, b, c = shape_ABC
    for first in range(0, a, rows):
        last = min(first + rows, a)
        yield Chunk(part, first * b * c, last * b * c, (last - first, b, c), slice(first, last), slice(0, b))


def padded_chunk(source: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another dtype, with zeros up to whole vectors."""
    out = source.new_zeros(-(-source.numel() // VECTOR) * VECTOR, dtype=dtype)
    out[: source.numel()].copy_(source)
    return out
