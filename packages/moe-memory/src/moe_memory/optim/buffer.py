"""`Buffer`: master weights of some parameters in one flat tensor, and the chunks in which they are updated.

Shape legend: A, C elements before and behind the dim of blocks, B along it (`optim.blocks`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from moe_memory.optim.blocks import BLOCK, block_dim, view_by_block
from moe_memory.optim.rounding import element_numbers, random_bits, round_to_bfloat16
from moe_memory.optim.rules import UpdateRule
from moe_parallel import Box, ParameterKind, ShardSpec

# Elements that are in the dtype of the arithmetic at once: a few tensors of this size fit into a processor's cache.
CHUNK_ELEMENTS = 2**17
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

    def random_bits(self, seed: int, update: int, device: torch.device) -> Tensor:
        """Of the elements, for `keep` (`rounding.random_bits`)."""
        number = element_numbers(self.part.box, self.part.spec.shape, self.start, self.stop, device)
        return random_bits(seed, update, self.part.name, number)


@dataclass(kw_only=True)
class Buffer:
    """Master weights.

    Attributes:
        weights: flat and contiguous; updated in place.
        parts: of parameters that follow one rule; what lies between them is zero.
        rule: of all of them.
        compute: dtype of the weights that the model computes with.
        kind: of all of them.
        has_copies: whether other ranks than replicas hold the same parts, and update them themselves.
        may_leave: whether the model computes with other tensors, so that the memory of these may be free between
            updates.
    """

    weights: Tensor
    parts: list[Part]
    rule: UpdateRule
    compute: torch.dtype
    kind: ParameterKind = ParameterKind.DENSE
    has_copies: bool = False
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


def work_on(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """The elements of a chunk in the dtype of the arithmetic, to be changed in place and given to `keep`.

    They are the stored ones if these are of that dtype and fill whole vectors; else a copy, with zeros behind them.
    """
    if stored.dtype == dtype and stored.numel() % VECTOR == 0:
        return stored
    work = whole_vectors(stored, dtype)
    work[: stored.numel()].copy_(stored)
    return work


def whole_vectors(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Memory for so many elements, and zeros up to whole vectors."""
    work = torch.empty(-(-stored.numel() // VECTOR) * VECTOR, dtype=dtype, device=stored.device)
    work[stored.numel() :].zero_()
    return work


def keep(stored: Tensor, work: Tensor, bits: Tensor | None = None, field: str = "") -> None:
    """Store what `work_on` gave out.

    Args:
        bits: random bits of the elements, so that what is stored in bfloat16 is rounded stochastically.
        field: which of them (`round_to_bfloat16`).
    """
    if work.untyped_storage() is stored.untyped_storage():
        return
    values = work[: stored.numel()]
    if stored.dtype == torch.bfloat16 and bits is not None:
        values = round_to_bfloat16(values, bits, field)
    stored.copy_(values)
