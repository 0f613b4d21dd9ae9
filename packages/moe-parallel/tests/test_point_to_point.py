"""A shift along a ring and messages between two ranks: who gets what, buffers, and failures that name the group."""

import multiprocessing
import time

import pytest
import torch
import torch.distributed as dist

from moe_parallel import CollectiveError, MoeParallelError, ParallelLayout, run_distributed, shift
from moe_parallel.point_to_point import receive, send

pytestmark = pytest.mark.dist


def on_ranks(ranks, fn, **limits):
    return run_distributed(ParallelLayout(world=ranks, cp=ranks), lambda mesh: fn(mesh.group("cp")), **limits)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_gets_what_the_one_before_has(ranks):
    def on_rank(group):
        here = torch.full((3, 2), float(group.rank()))
        other = torch.full((2, 3), 10.0 * group.rank()).t()  # not contiguous, and in flight at the same time
        first, second = shift(here, group), shift(other, group)
        before = (group.rank() - 1) % ranks
        assert torch.equal(second.wait(), torch.full((3, 2), 10.0 * before))
        assert torch.equal(first.wait(), torch.full((3, 2), float(before)))
        spare = torch.empty(3, 2)
        for step in range(ranks):  # all the way round, with two buffers
            coming = shift(here, group, spare)
            here, spare = coming.wait(), here
            assert here[0, 0] == (group.rank() - step - 1) % ranks

    on_ranks(ranks, on_rank)


def test_what_fails_on_the_device_of_this_rank_is_no_lost_peer(monkeypatch):
    def fail(*arguments, **options):
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    def on_rank(group):
        monkeypatch.setattr(dist, "irecv", fail)
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            receive(torch.ones(1), group, 1 - group.rank())
        monkeypatch.undo()  # a shift names what it does by torch's functions
        monkeypatch.setattr(dist, "batch_isend_irecv", fail)
        with pytest.raises(torch.AcceleratorError, match="device-side assert"):
            shift(torch.ones(1), group)

    on_ranks(2, on_rank)


def test_nothing_waits_before_wait():
    called = multiprocessing.get_context("fork").Event()

    def on_rank(group):
        if group.rank() == 1:
            assert called.wait(10), "the call waits for the neighbour"
        coming = shift(torch.ones(1 << 20), group)
        early = coming.done()
        called.set()
        assert coming.wait().sum() == 1 << 20
        assert coming.done()
        return early

    assert not on_ranks(2, on_rank)[0]


def test_buffers_stay_alive_while_bytes_travel():
    """The caller may drop what it gave before the neighbour has come."""

    def on_rank(group):
        pending = shift(torch.full((50_000, 2), float(group.rank())).t(), group)  # a copy is sent
        garbage = [torch.full((2, 50_000), float("nan")) for _ in range(8)]  # takes what was freed
        if group.rank() == 1:
            time.sleep(0.2)
        del garbage
        assert torch.equal(pending.wait(), torch.full((2, 50_000), 1.0 - group.rank()))

    on_ranks(2, on_rank)


def test_a_neighbour_that_does_not_come_is_named_with_the_group():
    def on_rank(group):
        if group.rank() == 1:
            time.sleep(1.6)
            return
        pending = shift(torch.ones(1 << 20), group)
        for _ in range(2):
            with pytest.raises(CollectiveError, match=r"rank 0: shift in group cp = .* of ranks 0, 1 failed after 1"):
                pending.wait()

    on_ranks(2, on_rank, timeout_s=1)


def test_messages_between_two_ranks_keep_their_order():
    """Of different sizes, both ways at once, and received into buffers that are there before they are sent."""
    sizes = [(3, 2), (1,), (0, 4), (1 << 18,), ()]

    def on_rank(group):
        here, other = group.rank(), 1 - group.rank()
        coming = [receive(torch.empty(size, dtype=torch.float64), group, other) for size in sizes]
        leaving = [
            send(torch.full(size, 10.0 * here + n, dtype=torch.float64), group, other) for n, size in enumerate(sizes)
        ]
        for n, pending in reversed(list(enumerate(coming))):
            assert torch.equal(pending.wait(), torch.full(sizes[n], 10.0 * other + n, dtype=torch.float64))
        for pending in leaving:
            pending.wait()
            assert pending.done()

    on_ranks(2, on_rank)


def test_places_are_those_of_the_group():
    """Ranks 1 and 3 of the world are places 0 and 1 of their pipeline."""

    def on_rank(mesh):
        group, rank = mesh.group("pp"), mesh.rank("pp")
        if rank == 0:
            send(torch.arange(6.0).view(2, 3).t(), group, 1).wait()  # a copy is sent
            return None
        return receive(torch.empty(3, 2), group, 0).wait().tolist()

    found = run_distributed(ParallelLayout(world=4, pp=2), on_rank)
    assert found == [None, None, *[[[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]] * 2]


def test_a_sender_that_does_not_come_is_named_with_the_group():
    def on_rank(group):
        if group.rank() == 1:
            time.sleep(1.6)
            return
        with pytest.raises(CollectiveError, match=r"rank 0: receive in group cp = .* of ranks 0, 1 failed after 1"):
            receive(torch.empty(3), group, 1).wait()

    on_ranks(2, on_rank, timeout_s=1)


def test_what_cannot_be_received_into():
    def on_rank(group):
        with pytest.raises(
            MoeParallelError, match=r"receive in group cp = .* of ranks 0, 1 is in place and needs contig"
        ):
            receive(torch.empty(3, 2).t(), group, 1 - group.rank())

    on_ranks(2, on_rank)
