"""Whole matrices for Muon: each has an owner among the ranks that hold parts of it, which gets them and returns parts.

An owner makes an update that all would make if each gathered the matrix: the work is divided by the number of ranks,
and two exchanges of a part take the place of gathering the whole. Owners are the same on all ranks by arithmetic.

Ranks that hold the same part, such as those of `tp` a matrix that is not split, all get it back; the first of them
sends it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moe_memory.optim.matrices import intersection, matrices, slices
from moe_parallel import Box, ShardSpec, all_gather, all_to_all

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Of the matrices that a rank has whole at once, unless one has more.
_ROUND_ELEMENTS = 2**25


@dataclass(frozen=True)
class Matrix:
    """One matrix, and who updates it."""

    name: str
    box: Box
    owner: int


@dataclass(frozen=True)
class _Piece:
    """What one rank holds of a matrix; `sends` unless another with the same part does."""

    matrix: Matrix
    rank: int
    box: Box
    sends: bool


class WholeMatrices:
    """Brings matrices of parameters together, lets a function update them, and brings parts back.

    Args:
        parameters: and the rows of their matrices (`OptimGroup.rows`), the same on all ranks of the group.
        boxes: this rank's parts by name; what is missing or empty is nothing.
        device: of the parts.
        dtype: in which they are sent, and whole.
        group: of all ranks that hold parts; None for one rank.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[ShardSpec, tuple[int, ...]]],
        boxes: Mapping[str, Box],
        device: torch.device,
        dtype: torch.dtype,
        group: "ProcessGroup | None",
    ) -> None:
        self._group = group
        self._nothing = torch.empty(0, dtype=dtype, device=device)
        self._rank, self._ranks = (0, 1) if group is None else (group.rank(), group.size())
        self._boxes = boxes
        boxes_of_ranks = _gathered([spec for spec, _ in parameters], boxes, device, group)
        whole = [(spec.name, box) for spec, rows in parameters for box in matrices(spec, rows)]
        # What no rank of this group holds belongs to others, as the experts of other ranks of `ep` do.
        held = [(name, box) for name, box in whole if any(intersection(box, rank[name]) for rank in boxes_of_ranks)]
        owners = _assigned([_work(box) for _, box in held], self._ranks)
        found = [Matrix(name, box, owner) for (name, box), owner in zip(held, owners, strict=True)]
        self._rounds = [list(self._pieces(some, boxes_of_ranks)) for some in _rounds(found, self._ranks)]

    def update(self, parts: Mapping[str, Tensor], change: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Replace every matrix by what the function makes of it, in place.

        Args:
            parts: this rank's parts by name, in the shape of their boxes.
            change: of the matrices, two-dimensional, that this rank owns in a round.
        """
        for pieces in self._rounds:
            mine = [piece for piece in pieces if piece.matrix.owner == self._rank]
            here = [piece for piece in pieces if piece.rank == self._rank]
            whole = self._gather(mine, [piece for piece in here if piece.sends], parts)
            changed = change([tensor.view(_two_dims(matrix.box)) for matrix, tensor in whole.items()])
            results = {matrix: result.view(matrix.box.shape) for matrix, result in zip(whole, changed, strict=True)}
            self._scatter(mine, here, results, parts)

    def _gather(
        self, mine: Sequence[_Piece], here: Sequence[_Piece], parts: Mapping[str, Tensor]
    ) -> dict[Matrix, Tensor]:
        incoming = [piece for piece in mine if piece.sends]
        values = (self._part(piece, parts) for piece in sorted(here, key=lambda piece: piece.matrix.owner))
        sent = torch.cat([self._nothing, *(value.flatten().to(self._nothing.dtype) for value in values)])
        counts = _counts(((piece.matrix.owner, piece) for piece in here), self._ranks)
        received = self._exchange(sent, counts, _counts(((piece.rank, piece) for piece in incoming), self._ranks))
        whole = {piece.matrix: self._nothing.new_empty(piece.matrix.box.shape) for piece in mine}
        start = 0
        for piece in sorted(incoming, key=lambda piece: piece.rank):
            size = prod(piece.box.shape)
            target = whole[piece.matrix][slices(piece.box, piece.matrix.box)]
            target.copy_(received[start : start + size].view(piece.box.shape))
            start += size
        return whole

    def _scatter(
        self,
        mine: Sequence[_Piece],
        here: Sequence[_Piece],
        results: Mapping[Matrix, Tensor],
        parts: Mapping[str, Tensor],
    ) -> None:
        values = (
            results[piece.matrix][slices(piece.box, piece.matrix.box)]
            for piece in sorted(mine, key=lambda piece: piece.rank)
        )
        sent = torch.cat([self._nothing, *(value.flatten().to(self._nothing.dtype) for value in values)])
        counts = _counts(((piece.rank, piece) for piece in mine), self._ranks)
        received = self._exchange(sent, counts, _counts(((piece.matrix.owner, piece) for piece in here), self._ranks))
        start = 0
        for piece in sorted(here, key=lambda piece: piece.matrix.owner):
            size = prod(piece.box.shape)
            self._part(piece, parts).copy_(received[start : start + size].view(piece.box.shape))
            start += size

    def _exchange(self, sent: Tensor, send_counts: list[int], receive_counts: list[int]) -> Tensor:
        if self._group is None:
            return sent
        return all_to_all(sent, self._group, send_rows=send_counts, receive_rows=receive_counts).wait()

    def _part(self, piece: _Piece, parts: Mapping[str, Tensor]) -> Tensor:
        name = piece.matrix.name
        return parts[name][slices(piece.box, self._boxes[name])]

    def _pieces(self, some: Sequence[Matrix], boxes_of_ranks: Sequence[Mapping[str, Box]]) -> Iterator[_Piece]:
        """Pieces that this rank has or owns the matrix of."""
        for matrix in some:
            seen: set[Box] = set()
            for rank, boxes in enumerate(boxes_of_ranks):
                box = intersection(matrix.box, boxes[matrix.name])
                if box is None:
                    continue
                if self._rank in (rank, matrix.owner):
                    yield _Piece(matrix, rank, box, sends=box not in seen)
                seen.add(box)


def _gathered(
    specs: Sequence[ShardSpec], boxes: Mapping[str, Box], device: torch.device, group: "ProcessGroup | None"
) -> list[dict[str, Box]]:
    """The parts of every rank, by name."""
    empty = {spec.name: Box((0,) * len(spec.shape), (0,) * len(spec.shape)) for spec in specs}
    own = [boxes.get(spec.name, empty[spec.name]) for spec in specs]
    numbers = torch.tensor([n for box in own for n in (*box.offset, *box.shape)], dtype=torch.int64, device=device)
    every = numbers[None] if group is None else all_gather(numbers, group).wait().view(group.size(), -1)
    found = []
    for row in every.tolist():
        rest = iter(row)
        table = {}
        for spec in specs:
            offset, shape = (tuple(next(rest) for _ in spec.shape) for _ in range(2))
            table[spec.name] = Box(offset, shape)
        found.append(table)
    return found


def _work(box: Box) -> int:
    """Of the iterations, up to a factor."""
    rows, columns = _two_dims(box)
    return rows * columns * min(rows, columns)


def _two_dims(box: Box) -> tuple[int, int]:
    """Rows and columns of a matrix, which has one entry along all dims but two."""
    longer = [size for size in box.shape if size > 1]
    rows, columns = [1, 1, *longer][-2:]
    return rows, columns


def _assigned(work: Sequence[int], ranks: int) -> list[int]:
    """An owner for each matrix: the largest first, to the rank that has least."""
    owners, loads = [0] * len(work), [0] * ranks
    for index in sorted(range(len(work)), key=lambda index: (-work[index], index)):
        owner = min(range(ranks), key=lambda rank: (loads[rank], rank))
        owners[index] = owner
        loads[owner] += work[index]
    return owners


def _rounds(found: Sequence[Matrix], ranks: int) -> list[list[Matrix]]:
    """Matrices in the order of the model, some of every owner in each round."""
    rounds: list[list[Matrix]] = []
    for owner in range(ranks):
        number, room = -1, 0
        for matrix in (matrix for matrix in found if matrix.owner == owner):
            size = prod(matrix.box.shape)
            if number < 0 or size > room:
                number, room = number + 1, _ROUND_ELEMENTS
            room -= size
            if number == len(rounds):
                rounds.append([])
            rounds[number].append(matrix)
    return rounds


def _counts(pieces: Iterator[tuple[int, _Piece]], ranks: int) -> list[int]:
    counts = [0] * ranks
    for rank, piece in pieces:
        counts[rank] += prod(piece.box.shape)
    return counts
