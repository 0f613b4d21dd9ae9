"""Which queries of a rank see which keys of another, as rectangles of work; decided once per microbatch, on the host.

The slots of a document are consecutive, and every rank holds its slots in ascending order. So what a query sees of the
keys of a rank is an interval of them, and visibility is two numbers for each query and rank, not a matrix. Rectangles
in which every query sees every key, or exactly the keys up to itself, need no mask; those in which nobody sees anything
are not made. Of a head-tail row this leaves the first half of the keys of an earlier rank and the last half of the
queries for a later one.

Shape legend: B rows, R slots of a whole row, C ranks, S slots of a row on one rank; Q queries and K keys of a tile.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parallel.errors import MoeParallelError
from moe_parallel.sequence import ContextSplit, once_per_microbatch

# Pairs of a tile that a mask may hide, in one row: so many computed for nothing cost no more than another kernel call.
# Of a large tile an eighth may be hidden.
HIDDEN_PAIRS = 4096


@dataclass(frozen=True, kw_only=True, eq=False)
class Tile:
    """A rectangle of queries and keys, for one row or for all.

    Attributes:
        causal: query i of the tile sees the keys 0 to i of the tile; there are as many.
        visible_BQK: which key a query sees, where that is neither all nor `causal`; of one row where it is the same in
            all. Queries may see nothing.
    """

    rows: slice
    queries: slice
    keys: slice
    causal: bool = False
    visible_BQK: Tensor | None = None

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that a kernel computes for a row of this tile."""
        num_queries: int = self.queries.stop - self.queries.start
        num_keys: int = self.keys.stop - self.keys.start
        return num_queries * (num_queries + 1) // 2 if self.causal else num_queries * num_keys


class RowTiles:
    """The tiles of the rows of a microbatch.

    The host waits for the device of the arguments when this is built, and for that of the masks when tiles are made.

    Args:
        slot_CBS: the slots that each rank holds, as of `ContextSplit`; of whole rows there is one rank.
        document_BR: document number of every slot of the whole rows; None where a row is one document.

    Raises:
        MoeParallelError: the slots of a document are not consecutive, or ranks do not hold every slot once, ascending.
    """

    def __init__(self, slot_CBS: Tensor, document_BR: Tensor | None) -> None:
        if document_BR is None:
            self._slot_CBS = slot_CBS.cpu().contiguous()
            ranks, batch, num_slots = slot_CBS.shape
            self._start_BR = torch.zeros(batch, ranks * num_slots, dtype=torch.int64)
        else:
            together = torch.cat([slot_CBS.flatten(), document_BR.flatten().to(slot_CBS.device)]).cpu()  # one wait
            self._slot_CBS = together[: slot_CBS.numel()].view(slot_CBS.shape)
            self._start_BR = _starts(together[slot_CBS.numel() :].view(document_BR.shape))
        _check_slots(self._slot_CBS)
        self._made: dict[tuple[int, int | None, torch.device], list[list[Tile]]] = {}

    def of(self, rank: int, window: int | None, device: torch.device) -> list[list[Tile]]:
        """For each rank whose keys may come, the tiles of the queries of `rank`; made at the first call.

        Masks are kept as long as this object, a byte for each pair of their tiles.
        """
        key = rank, window, device
        if key not in self._made:
            self._made[key] = self._make(rank, window, device)
        return self._made[key]

    def _make(self, rank: int, window: int | None, device: torch.device) -> list[list[Tile]]:
        slot_CBS, start_BR = self._slot_CBS, self._start_BR
        num_slots, slot_BS = slot_CBS.shape[2], slot_CBS[rank]
        start_BS = start_BR.gather(1, slot_BS)
        first_BS = start_BS if window is None else torch.maximum(start_BS, slot_BS - (window - 1))
        alike = len(slot_BS) == 1 or all(bool((x == x[..., :1, :]).all()) for x in (slot_CBS, start_BR))
        if alike or num_slots**2 <= HIDDEN_PAIRS:
            groups = [(slice(None), slice(0, 1) if alike else slice(None))]
        else:
            groups = [(slice(row, row + 1),) * 2 for row in range(len(slot_BS))]
        low_CBS = torch.searchsorted(slot_CBS, first_BS.expand_as(slot_CBS).contiguous())
        high_CBS = torch.searchsorted(slot_CBS, slot_BS.expand_as(slot_CBS).contiguous(), right=True)
        seen_2CBS = torch.stack([low_CBS, high_CBS])
        for_masks_2CBS = seen_2CBS.to(device)  # one copy for all masks
        tiles: list[list[Tile]] = [[] for _ in slot_CBS]
        for rows, read in groups:
            cuts = _cuts(slot_BS[read], start_BS[read])
            for other, of_rank in enumerate(tiles):
                low_high = seen_2CBS[:, other, read], for_masks_2CBS[:, other, read]
                of_rank.extend(_rectangles(rows, *low_high, slice(0, num_slots), cuts))
        return tiles


def tiles_of(split: ContextSplit) -> RowTiles:
    """The tiles of rows that ranks share; made at the first layer that asks, and dropped with the split."""
    return once_per_microbatch(split, "tiles", lambda: RowTiles(split.slot_CBS, split.document_BR))


def _starts(document_BR: Tensor) -> Tensor:
    """Where the document of every slot begins."""
    new_BR = torch.ones_like(document_BR, dtype=torch.bool)
    new_BR[:, 1:] = document_BR.diff(dim=1) != 0
    numbers_B = (document_BR.sort(dim=1).values.diff(dim=1) != 0).sum(1) + 1
    if not torch.equal(numbers_B, new_BR.sum(1)):
        row = int((numbers_B != new_BR.sum(1)).nonzero()[0])
        raise MoeParallelError(
            f"the slots of a document are consecutive, but row {row} has {int(numbers_B[row])} documents in "
            f"{int(new_BR[row].sum())} pieces; give every piece a document number of its own"
        )
    return torch.where(new_BR, torch.arange(document_BR.shape[1]), 0).cummax(dim=1).values


def _check_slots(slot_CBS: Tensor) -> None:
    slot_BR = slot_CBS.transpose(0, 1).flatten(1)
    whole = torch.equal(slot_BR.sort(dim=1).values, torch.arange(slot_BR.shape[1]).expand_as(slot_BR))
    if not whole or bool((slot_CBS.diff(dim=2) <= 0).any()):
        raise MoeParallelError(
            f"each of the slots 0 to {slot_BR.shape[1] - 1} of a row is held by one rank, in ascending order, but the "
            "split has others; split_context makes one"
        )


def _cuts(slot_BS: Tensor, start_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Places among the queries where another document begins, and where slots were left out."""
    return tuple(  # type: ignore[return-value]
        (found.any(0).nonzero().squeeze(1) + 1) for found in (start_BS.diff(dim=1) != 0, slot_BS.diff(dim=1) != 1)
    )


def _rectangles(
    rows: slice, seen_2BS: Tensor, for_masks_2BS: Tensor, queries: slice, cuts: tuple[Tensor, Tensor]
) -> list[Tile]:
    """Tiles of some queries, which see the keys `low <= key < high`; low and high on the host and where masks go."""
    low_BQ, high_BQ = seen_2BS[:, :, queries]
    sees_Q = (low_BQ < high_BQ).any(0).nonzero().squeeze(1)
    if not len(sees_Q):
        return []
    begin, end = queries.start + int(sees_Q[0]), queries.start + int(sees_Q[-1]) + 1
    low_BQ, high_BQ = seen_2BS[:, :, begin:end]
    sees_BQ = low_BQ < high_BQ
    keys = slice(int(low_BQ[sees_BQ].min()), int(high_BQ[sees_BQ].max()))
    tile = Tile(rows=rows, queries=slice(begin, end), keys=keys)
    if bool((low_BQ == keys.start).all()):
        if bool((high_BQ == keys.stop).all()):
            return [tile]
        if bool((high_BQ == torch.arange(keys.start + 1, keys.start + 1 + end - begin)).all()):
            return [Tile(rows=rows, queries=tile.queries, keys=keys, causal=True)]
    area, seen = sees_BQ.numel() * (keys.stop - keys.start), int((high_BQ - low_BQ).clamp(min=0).sum())
    if area - seen <= max(HIDDEN_PAIRS * len(sees_BQ), area // 8):
        low_BQ1, high_BQ1 = for_masks_2BS[:, :, begin:end].unsqueeze(3)
        key_K = torch.arange(keys.start, keys.stop, device=low_BQ1.device)
        visible_BQK = (key_K >= low_BQ1) & (key_K < high_BQ1)
        return [Tile(rows=rows, queries=tile.queries, keys=keys, visible_BQK=visible_BQK)]
    middle = _place_to_cut(begin, end, cuts)
    return [
        found
        for part in (slice(begin, middle), slice(middle, end))
        for found in _rectangles(rows, seen_2BS, for_masks_2BS, part, cuts)
    ]


def _place_to_cut(begin: int, end: int, cuts: tuple[Tensor, Tensor]) -> int:
    """The middle, or the place nearest to it where a document begins, or else where slots were left out."""
    middle = (begin + end) // 2
    for cut_N in cuts:
        inside_N = cut_N[(cut_N > begin) & (cut_N < end)]
        if len(inside_N):
            return int(inside_N[(inside_N - middle).abs().argmin()])
    return middle
