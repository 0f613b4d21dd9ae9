"""Tiles against visibility written out as a matrix: nothing seen is missing, nothing hidden is left unmasked."""

import weakref

import pytest
import torch

from moe_parallel import ContextSplit, MoeParallelError, head_tail, per_document
from moe_parallel.attention import tiles as tiles_module
from moe_parallel.attention.tiles import tiles_of
from moe_parallel.sequence import once_per_microbatch

CPU = torch.device("cpu")


def split_of(slot_CBS, document_BR=None):
    return ContextSplit(group=None, slot_CBS=slot_CBS, document_BR=document_BR)


def visible_by_tiles(tiles, batch, slots):
    """[B, S, S] and how many tiles cover each pair that is seen."""
    count = torch.zeros(batch, slots, slots, dtype=torch.int64)
    for tile in tiles:
        part = count[tile.rows, tile.queries, tile.keys]
        seen = torch.ones_like(part, dtype=torch.bool)
        if tile.causal:
            seen = seen.tril()
        if tile.visible_BQK is not None:
            seen = seen & tile.visible_BQK
        part += seen
    return count


def visible_by_definition(split, rank, other, window):
    q, k = split.slot_CBS[rank].unsqueeze(2), split.slot_CBS[other].unsqueeze(1)
    seen = (k <= q) & (q - k < (window or 10**9))
    if split.document_BR is not None:
        document_q, document_k = (split.document_BR.gather(1, split.slot_CBS[r]) for r in (rank, other))
        seen &= document_q.unsqueeze(2) == document_k.unsqueeze(1)
    return seen.long()


def splits(seed):
    generator = torch.Generator().manual_seed(seed)
    ranks, pieces = 3, 7
    num_slots = 2 * ranks * pieces
    rows = head_tail(num_slots, ranks).unsqueeze(1).expand(-1, 2, -1)
    document_BR = torch.randint(0, 2, (2, num_slots), generator=generator).cumsum(1) // 3
    yield split_of(rows)
    yield split_of(torch.arange(num_slots).view(ranks, 1, -1).expand(-1, 2, -1))
    yield split_of(rows, document_BR)
    yield split_of(per_document(document_BR, ranks), document_BR)
    anything = torch.stack([torch.randperm(num_slots, generator=generator).view(ranks, -1) for _ in range(2)], dim=1)
    yield split_of(anything.sort(dim=2).values, document_BR)


@pytest.mark.parametrize("hidden", [0, 16, 4096])
@pytest.mark.parametrize("window", [None, 1, 5, 1000])
def test_tiles_cover_every_visible_pair_once_and_no_other(monkeypatch, hidden, window):
    monkeypatch.setattr(tiles_module, "HIDDEN_PAIRS", hidden)
    for split in splits(hidden):
        ranks, batch, slots = split.slot_CBS.shape
        for rank in range(ranks):
            for other, tiles in enumerate(tiles_of(split).of(rank, window, CPU)):
                got = visible_by_tiles(tiles, batch, slots)
                assert torch.equal(got, visible_by_definition(split, rank, other, window))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_head_tail_rows_need_no_mask_and_no_hidden_pair(ranks):
    """An earlier rank's keys: the first half of them; a later one's: the second half of the queries."""
    pieces = 150
    split = split_of(head_tail(2 * ranks * pieces, ranks).unsqueeze(1))
    slots, computed = 2 * pieces, 0
    first, second, whole = slice(0, pieces), slice(pieces, slots), slice(0, slots)
    for rank in range(ranks):
        for other, (tile,) in enumerate(tiles_of(split).of(rank, None, CPU)):
            assert tile.visible_BQK is None
            queries = second if other > rank else whole
            keys = first if other < rank else whole
            assert (tile.queries, tile.keys, tile.causal) == (queries, keys, other == rank)
            computed += tile.pairs
    num_slots = ranks * slots
    assert computed == num_slots * (num_slots + 1) // 2, "half of all pairs and the diagonal"


def test_documents_and_windows_leave_out_most_pairs():
    lengths = torch.tensor([700, 100, 30, 1, 2, 650, 565])
    document_BR = torch.repeat_interleave(torch.arange(7), lengths).unsqueeze(0)
    seen = sum(int(n * (n + 1) // 2) for n in lengths)
    split = split_of(per_document(document_BR, 4), document_BR)
    by_rank = [sum(tile.pairs for tiles in tiles_of(split).of(rank, None, CPU) for tile in tiles) for rank in range(4)]
    assert seen <= sum(by_rank) < 1.15 * seen
    assert max(by_rank) < 1.05 * sum(by_rank) / 4
    row = split_of(head_tail(2048, 4).unsqueeze(1))
    windowed = sum(tile.pairs for rank in range(4) for tiles in tiles_of(row).of(rank, 64, CPU) for tile in tiles)
    assert 64 * 2048 - 64 * 63 // 2 <= windowed < 4 * 64 * 2048


def test_rows_that_are_alike_share_a_tile():
    split = split_of(head_tail(32, 2).unsqueeze(1).expand(-1, 5, -1))
    for tiles in tiles_of(split).of(0, 3, CPU):
        assert [tile.rows for tile in tiles] == [slice(None)] * len(tiles)
        assert all(tile.visible_BQK is None or len(tile.visible_BQK) == 1 for tile in tiles)


def test_tiles_are_made_once_and_end_with_the_split():
    split = split_of(head_tail(32, 2).unsqueeze(1))
    rows = tiles_of(split)
    assert tiles_of(split) is rows
    assert rows.of(0, 3, CPU) is rows.of(0, 3, CPU)
    assert rows.of(0, 4, CPU) is not rows.of(0, 3, CPU)
    made = []
    for _ in range(2):
        once_per_microbatch(split, "name", lambda: made.append(1))
    assert made == [1]
    end = weakref.ref(rows)
    del rows
    assert end() is not None
    del split
    assert end() is None


@pytest.mark.parametrize("slots", [[[0, 1], [1, 3]], [[1, 0], [2, 3]], [[0, 1], [2, 4]]])
def test_a_split_that_is_none_is_refused(slots):
    with pytest.raises(MoeParallelError, match="slots 0 to 3 of a row is held by one rank, in ascending order"):
        tiles_of(split_of(torch.tensor(slots).unsqueeze(1)))


def test_a_document_in_two_pieces_is_refused():
    document_BR = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    split = split_of(head_tail(4, 2).unsqueeze(1).expand(-1, 2, -1), document_BR)
    with pytest.raises(MoeParallelError, match="row 1 has 2 documents in 3 pieces"):
        tiles_of(split)
