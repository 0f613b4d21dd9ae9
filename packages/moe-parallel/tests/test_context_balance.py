"""Who holds which slot: exact shares, work counted pair by pair, and shards that join to what they were."""

import pytest
import torch

from moe_parallel import (
    ContextSplit,
    MoeParallelError,
    document_numbers,
    head_tail,
    join_slots,
    padded_slots,
    per_document,
    select_slots,
    split_context,
)


class GroupOf:
    def __init__(self, ranks):
        self.size = lambda: ranks


def documents(lengths):
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))


def busiest_to_mean(slot_CS, document_R):
    """Of the pairs of a query and a key that it sees, by rank."""
    counts = torch.bincount(document_R)
    start = (counts.cumsum(0) - counts)[document_R]
    seen_R = torch.arange(len(document_R)) - start + 1
    work_C = seen_R[slot_CS].sum(1).double()
    return (work_C.max() / work_C.mean()).item()


def is_a_split(slot_CBS, num_slots):
    whole = slot_CBS.transpose(0, 1).flatten(1).sort(dim=1).values
    ascending = bool((slot_CBS.diff(dim=2) > 0).all())
    return ascending and torch.equal(whole, torch.arange(num_slots).expand(len(whole), -1))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_head_and_tail_are_exactly_the_same_work(ranks):
    slot_CS = head_tail(ranks * 2 * 5, ranks)
    assert is_a_split(slot_CS.unsqueeze(1), ranks * 2 * 5)
    assert busiest_to_mean(slot_CS, torch.zeros(ranks * 10, dtype=torch.int64)) == 1
    contiguous = torch.arange(ranks * 10).view(ranks, -1)
    if ranks > 1:
        assert busiest_to_mean(contiguous, torch.zeros(ranks * 10, dtype=torch.int64)) > 1.3


def test_head_and_tail_by_hand():
    assert head_tail(12, 3).tolist() == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


@pytest.mark.parametrize(("num_slots", "ranks"), [(6, 2), (4, 4), (0, 2), (9, 1)])
def test_a_row_that_cannot_be_cut_is_refused_with_what_helps(num_slots, ranks):
    wanted = padded_slots(max(num_slots, 1), ranks)
    with pytest.raises(MoeParallelError, match=f"row of {num_slots} slots .* multiple of {2 * ranks} .* says {wanted}"):
        head_tail(num_slots, ranks)


def test_padding_to_whole_pieces():
    assert [padded_slots(slots, 2) for slots in (0, 1, 4, 5, 8)] == [0, 4, 4, 8, 8]
    assert padded_slots(9, 2, also_multiple_of=3) == 12


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_documents_of_any_length_give_every_rank_the_same_number_of_slots(ranks, seed):
    generator = torch.Generator().manual_seed(seed)
    num_slots = 2 * ranks * 12
    rows = []
    for _ in range(3):
        cuts = torch.randint(1, num_slots, (int(torch.randint(0, 30, (), generator=generator)),), generator=generator)
        rows.append(document_numbers(torch.cat([torch.tensor([0]), cuts.sort().values]), num_slots))
    slot_CBS = per_document(torch.stack(rows), ranks)
    assert slot_CBS.shape == (ranks, 3, num_slots // ranks)
    assert is_a_split(slot_CBS, num_slots)
    for row, document_R in enumerate(rows):
        held = torch.stack([torch.bincount(document_R[slot_S], minlength=num_slots) for slot_S in slot_CBS[:, row]])
        assert (held.max(0).values - held.min(0).values).max() <= 2, "of every document too"


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_one_document_that_divides_is_cut_like_a_row(ranks):
    document_BR = torch.zeros(2, ranks * 6, dtype=torch.int64)
    assert torch.equal(per_document(document_BR, ranks)[:, 1], head_tail(ranks * 6, ranks))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_work_of_packed_rows_is_balanced_by_cutting_each_document(ranks):
    long = documents([1003, 257, 1, 640, 333, 2, 1860])
    assert busiest_to_mean(per_document(long.unsqueeze(0), ranks)[:, 0], long) < 1.01
    assert busiest_to_mean(head_tail(len(long), ranks), long) > 1.1
    # Documents shorter than the pieces are many balance only on average.
    lengths = torch.randint(1, 20, (400,), generator=torch.Generator().manual_seed(ranks)).tolist()
    lengths[-1] += padded_slots(sum(lengths), ranks) - sum(lengths)
    short = documents(lengths)
    assert busiest_to_mean(per_document(short.unsqueeze(0), ranks)[:, 0], short) < 1.05


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1], [3, 1, 9], [3, 0, 1, 0, 9]])
def test_r090_shards_of_very_short_rows_join_to_what_they_were(ranks, lengths):
    """Boundaries may repeat (a document without a token) and go on beyond the row."""
    num_slots = padded_slots(sum(lengths), ranks)
    ends = torch.tensor(lengths).cumsum(0)
    boundary_N = torch.cat([torch.tensor([0]), ends, torch.full((5,), int(ends[-1])), torch.full((3,), 10_000)])
    document_R = document_numbers(boundary_N, num_slots)
    wanted = [number for number, length in enumerate(lengths) for _ in range(length)]
    assert document_R[: sum(lengths)].tolist() == wanted
    assert (document_R[sum(lengths) :] > len(lengths) - 1).all(), "padding is no part of a document"
    x_BR = torch.randn(2, num_slots, 3)
    document_BR = document_R.expand(2, -1)
    for document in (None, document_BR):
        split = split_context(GroupOf(ranks), 2, num_slots, document)
        parts = [select_slots(x_BR, split, rank) for rank in range(ranks)]
        assert all(part.shape == (2, num_slots // ranks, 3) for part in parts)
        assert torch.equal(join_slots(parts, split), x_BR)


def test_selected_slots_are_those_of_the_split():
    slot_CBS = torch.tensor([[[0, 3], [1, 2]], [[1, 2], [0, 3]]])
    split = ContextSplit(group=GroupOf(2), slot_CBS=slot_CBS)
    x_BR = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]])
    assert select_slots(x_BR, split, 0).tolist() == [[10, 13], [21, 22]]
    assert select_slots(x_BR, split, 1).tolist() == [[11, 12], [20, 23]]


def test_documents_of_other_rows_are_refused():
    with pytest.raises(MoeParallelError, match=r"2 rows of 8 slots .* they are \[2, 4\]"):
        split_context(GroupOf(2), 2, 8, torch.zeros(2, 4, dtype=torch.int64))
