"""How parameters are cut into one part per rank, and where the parts lie in a flat bucket; arithmetic and views only.

A bucket has two orders. In the *whole* order parameter follows parameter, each contiguous: models compute with it and
autograd adds to it. In the *sections* order rank follows rank, and a section has one part of every parameter: it is
what collectives move and what a rank keeps masters and moments of. At one rank both are the same.

Shape legend: R ranks, S elements of a section.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TypeVar

from torch import Tensor

from moe_memory.optim.blocks import BLOCK
from moe_parallel import Box

K = TypeVar("K")

# Every part starts at a multiple of this many elements, and a section ends at one. All lie in whole vectors of 64 bytes
# then: what does not fill one torch's fused AdamW rounds differently, and values would depend on their place.
_ALIGNMENT = 16


def shard_dim(shape: Sequence[int], ranks: int, blocks: int | None = None) -> int:
    """The dim along which a parameter is cut: the first that has an entry for every rank, else dim 0.

    Experts are few where their replicas are many: one expert on 8 replicas is cut inside.

    Args:
        blocks: the dim along which blocks lie that must stay whole (`optim.blocks`); it is cut, between blocks, only
            where no other has an entry for every rank and it has the most.
    """
    if blocks is None:
        return next((dim for dim, size in enumerate(shape) if size >= ranks), 0)
    entries = {dim: -(-size // _unit(dim, blocks)) for dim, size in enumerate(shape)}
    others = (dim for dim, count in entries.items() if dim != blocks and count >= ranks)
    return next(others, max(entries, key=lambda dim: entries[dim]))


def shard_box(shape: Sequence[int], ranks: int, rank: int, dim: int | None = None, blocks: int | None = None) -> Box:
    """The part of a rank: equally many entries of the dim to every rank, fewer or none to the last ones.

    The dim is `shard_dim` unless given. A scalar is the first rank's; a box cannot say so, `owned` does.
    """
    if not shape:
        return Box((), ())
    dim = shard_dim(shape, ranks, blocks) if dim is None else dim
    size = _part_size(shape[dim], ranks, _unit(dim, blocks))
    start = min(rank * size, shape[dim])
    stop = min(start + size, shape[dim])
    offset, part = [0] * len(shape), list(shape)
    offset[dim], part[dim] = start, stop - start
    return Box(tuple(offset), tuple(part))


def owned(box: Box, rank: int) -> Box | None:
    """The box if the rank has something to show of the parameter: the first always, the others if it has elements.

    So a scalar, or a parameter without elements, is seen once.
    """
    return box if rank == 0 or (len(box.shape) > 0 and prod(box.shape) > 0) else None


def inside(outer: Box, inner: Box) -> Box:
    """A box that is given relative to another, in the coordinates of that other."""
    return Box(tuple(a + b for a, b in zip(outer.offset, inner.offset, strict=True)), inner.shape)


def cut(names: Sequence[K], sizes_bytes: Mapping[K, int], limit_bytes: int) -> list[list[K]]:
    """Names in groups of at most `limit_bytes`; those of a quarter of it or more are alone, however large.

    Alone a large parameter need not be copied (`BucketLayout.same`); small ones share the latency of a collective.
    """
    groups: list[list[K]] = []
    small: list[K] = []
    room = 0
    for name in names:
        size = sizes_bytes[name]
        if size >= limit_bytes / 4:
            groups.append([name])
            continue
        if not small or size > room:
            small, room = [], limit_bytes
            groups.append(small)
        small.append(name)
        room -= size
    return groups


class BucketLayout:
    """Places of parameters in both orders of a bucket.

    Args:
        shapes: by name.
        blocks: by name, the dim of blocks that are not cut.

    Attributes:
        whole_elements: length of the whole order.
        section_elements: S. A part takes as much of every section as the largest part of its parameter, so that
            sections are equally long.
        padded: whether sections have room that belongs to no part.
        same: whether both orders are one: at one rank, or of a single parameter that is cut into equal slices.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], ranks: int, blocks: Mapping[str, int] | None = None
    ) -> None:
        self.ranks = ranks
        self._blocks = blocks or {}
        self._shapes = dict(shapes)
        self._whole_starts: dict[str, int] = {}
        self._section_starts: dict[str, int] = {}
        self.whole_elements = self.section_elements = 0
        for name, shape in shapes.items():
            self._whole_starts[name] = self.whole_elements
            self._section_starts[name] = self.section_elements
            self.whole_elements += _aligned(prod(shape))
            self.section_elements += _aligned(prod(self.box(name, 0).shape))
        self.padded = ranks * self.section_elements > sum(map(prod, shapes.values()))
        name, first = next(iter(shapes.items()))
        sliced = len(shapes) == 1 and prod(first[: shard_dim(first, ranks, self._blocks.get(name))]) == 1
        self.same = ranks == 1 or (sliced and not self.padded)

    def box(self, name: str, rank: int) -> Box:
        """The part of a rank."""
        return shard_box(self._shapes[name], self.ranks, rank, blocks=self._blocks.get(name))

    def start(self, name: str) -> int:
        """The first element of every part in its section."""
        return self._section_starts[name]

    def whole(self, flat: Tensor, name: str) -> Tensor:
        """A parameter in a tensor in whole order."""
        start, shape = self._whole_starts[name], self._shapes[name]
        return flat[start : start + prod(shape)].view(shape)

    def part(self, section_S: Tensor, name: str, rank: int) -> Tensor:
        """The part of a rank in its section."""
        start, shape = self._section_starts[name], self.box(name, rank).shape
        return section_S[start : start + prod(shape)].view(shape)

    def pairs(self, flat: Tensor, sections_RS: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Every element in both orders, as pairs of equally shaped views, at most two a parameter."""
        for name, shape in self._shapes.items():
            whole, start = self.whole(flat, name), self._section_starts[name]
            if not shape:
                yield whole, sections_RS[0, start]
                continue
            dim = shard_dim(shape, self.ranks, self._blocks.get(name))
            size = self.box(name, 0).shape[dim]
            full, rest = divmod(shape[dim], size) if size else (0, 0)
            if full:
                part = (*shape[:dim], size, *shape[dim + 1 :])
                yield (
                    whole.narrow(dim, 0, full * size).view(*shape[:dim], full, *part[dim:]).movedim(dim, 0),
                    sections_RS[:full, start : start + prod(part)].view(full, *part),
                )
            if rest:
                part = (*shape[:dim], rest, *shape[dim + 1 :])
                yield (
                    whole.narrow(dim, full * size, rest),
                    sections_RS[full, start : start + prod(part)].view(part),
                )


def _unit(dim: int, blocks: int | None) -> int:
    """Entries of a dim that stay together."""
    return BLOCK if dim == blocks else 1


def _part_size(entries: int, ranks: int, unit: int) -> int:
    return -(-entries // (ranks * unit)) * unit


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT
