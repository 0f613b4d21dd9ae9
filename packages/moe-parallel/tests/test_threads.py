"""run_threads: real collectives in one process, and an end in every case."""

import contextlib
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from moe_parallel import MoeParallelError
from moe_parallel._torch_compat import threaded_collectives
from moe_parallel.testing import count_collectives, run_threads


@pytest.mark.parametrize("world", [1, 2, 3, 5, 16])
def test_results_come_by_rank_and_collectives_work(world):
    def on_rank(rank, groups):
        assert groups.size("ep") == world
        assert groups.rank("ep") == rank == dist.get_rank()
        assert (groups.group("ep") is None) == (world == 1)
        x = torch.full((2,), float(rank))
        dist.all_reduce(x)
        sent = torch.arange(world).repeat_interleave(rank + 1)  # rank + 1 copies of r go to rank r
        received = torch.empty(sum(range(1, world + 1)), dtype=torch.int64)
        dist.all_to_all_single(received, sent, [r + 1 for r in range(world)], [rank + 1] * world)
        assert received.tolist() == [rank] * len(received)
        return x[0].item()

    assert run_threads(world, on_rank) == [sum(range(world))] * world


def test_backward_communicates():
    def on_rank(rank, groups):
        x = torch.full((3,), rank + 1.0, dtype=torch.float64, requires_grad=True)
        y = functional.all_to_all_single_autograd(x, None, None, dist.group.WORLD)
        (y * (10.0 ** torch.arange(3, dtype=torch.float64)) * (rank + 1)).sum().backward()
        return y.tolist(), x.grad.tolist()

    results = run_threads(3, on_rank)
    for rank, (received, grad) in enumerate(results):
        assert received == [1.0, 2.0, 3.0]
        # What rank r received from here sits at place `rank` there and was weighted with 10^rank * (r + 1).
        assert grad == [10.0**rank * (r + 1) for r in range(3)]


def test_the_world_of_the_process_is_untouched():
    outside, hook = dist.distributed_c10d._world, sys.excepthook
    for fn in (lambda rank, groups: rank, lambda rank, groups: 1 / 0):
        with contextlib.suppress(ZeroDivisionError):
            run_threads(2, fn)
        assert dist.distributed_c10d._world is outside
        assert sys.excepthook is hook
        assert not dist.is_initialized()


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failing_rank_ends_all_and_is_named(failing):
    ended = []

    def on_rank(rank, groups):
        try:
            dist.barrier()
            if rank == failing:
                raise KeyError("lost")
            dist.all_reduce(torch.ones(1))
        finally:
            ended.append(rank)

    start = time.perf_counter()
    with pytest.raises(KeyError, match="lost") as caught:
        run_threads(4, on_rank)
    assert time.perf_counter() - start < 10
    assert caught.value.__notes__ == [f"raised on rank {failing} of 4"]
    assert sorted(ended) == [0, 1, 2, 3]


def test_a_rank_that_fails_during_backward_ends_all():
    def on_rank(rank, groups):
        x = torch.ones(2, requires_grad=True)
        y = functional.all_to_all_single_autograd(x, None, None, dist.group.WORLD) * 1.0
        if rank == 1:
            raise ValueError("before backward")
        y.sum().backward()

    with pytest.raises(ValueError, match="before backward") as caught:
        run_threads(2, on_rank)
    assert caught.value.__notes__ == ["raised on rank 1 of 2"]


def test_of_several_failing_ranks_the_lowest_is_raised():
    meeting = threading.Barrier(3)

    def on_rank(rank, groups):
        meeting.wait()
        raise ValueError(f"rank {rank}")

    for _ in range(5):
        with pytest.raises(ValueError, match="rank 0"):
            run_threads(3, on_rank)


def test_a_missing_call_is_noticed_at_once():
    def on_rank(rank, groups):
        if rank != 1:
            dist.all_reduce(torch.ones(1))

    start = time.perf_counter()
    with pytest.raises(
        MoeParallelError, match=r"rank 0 waits in all_?reduce; rank 2 waits .*ranks \[1\] have returned"
    ):
        run_threads(3, on_rank)
    assert time.perf_counter() - start < 10


def test_waiting_for_each_other_in_different_groups_is_noticed_at_once():
    def on_rank(rank, groups):
        pair = [dist.new_group([0, 1]), dist.new_group([0, 1])]
        dist.all_reduce(torch.ones(1), group=pair[rank])

    start = time.perf_counter()
    with pytest.raises(MoeParallelError, match="not all in the same one"):
        run_threads(2, on_rank)
    assert time.perf_counter() - start < 10


def test_ranks_that_meet_in_different_collectives_are_told_so():
    def on_rank(rank, groups):
        dist.barrier()
        if rank == 0:
            dist.all_reduce(torch.ones(2))
        else:
            dist.broadcast(torch.ones(2), 0)

    with pytest.raises(MoeParallelError, match=r"ranks disagree on collective 1 of a group: rank \d calls"):
        run_threads(2, on_rank)


def test_many_collectives_in_many_groups_are_not_mistaken_for_a_deadlock():
    def on_rank(rank, groups):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        total = 0.0
        for _ in range(50):
            x = torch.tensor([float(rank)])
            dist.all_reduce(x, group=pairs[rank // 2])
            dist.all_reduce(x)
            total += x.item()
        return total

    # Pair sums are 1 and 5, each counted twice.
    assert run_threads(4, on_rank) == [50 * 12.0] * 4


def test_the_time_limit_names_who_is_late():
    release = threading.Event()

    def on_rank(rank, groups):
        if rank == 1:
            release.wait(20)
        else:
            dist.barrier()

    threading.Timer(0.4, release.set).start()
    with pytest.raises(MoeParallelError, match=r"0\.2 s; still running: rank 0 in barrier, rank 1$"):
        run_threads(2, on_rank, timeout_s=0.2)
    assert run_threads(2, lambda rank, groups: rank) == [0, 1]


def test_misuse_is_refused():
    with pytest.raises(MoeParallelError, match="at least one rank, not 0"):
        run_threads(0, lambda rank, groups: None)
    with pytest.raises(MoeParallelError, match="inside, or at the same time"):
        run_threads(1, lambda rank, groups: run_threads(1, lambda rank, groups: None))


def issue_each_kind():
    """Issue collectives through every API of torch; returns how many."""
    world = dist.get_world_size()
    x = torch.ones(2 * world)
    dist.all_reduce(x)
    dist.barrier()
    dist.broadcast(x, 0)
    dist.all_gather([torch.empty_like(x) for _ in range(world)], x)
    dist.all_to_all_single(torch.empty_like(x), x)
    dist.all_to_all_single(torch.empty_like(x), x, async_op=True).wait()
    dist.reduce_scatter(torch.empty(2), list(x.chunk(world)))
    dist.all_gather_object([None] * world, "two collectives: sizes, then bytes")
    y = torch.ones(2 * world, requires_grad=True)
    z = functional.all_to_all_single_autograd(y, None, None, dist.group.WORLD)
    (z * 2).sum().backward()
    functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD))
    return 12


def test_counting_on_the_threaded_group():
    def on_rank(rank, groups):
        dist.barrier()
        with count_collectives() as issued:
            expected = issue_each_kind()
        dist.barrier()
        assert len(issued) == expected, issued
        with count_collectives() as outer:
            dist.barrier()
            with count_collectives() as inner:
                dist.barrier()
        assert (len(outer), len(inner)) == (2, 1)
        with count_collectives() as nothing:
            torch.ones(3).sum()
        assert nothing == []

    run_threads(3, on_rank)


def test_counting_is_per_thread():
    def on_rank(rank, groups):
        if rank == 0:
            with count_collectives() as issued:
                dist.barrier()
            dist.barrier()
            return len(issued)
        dist.barrier()
        dist.barrier()
        return None

    assert run_threads(2, on_rank) == [1, None]


def test_counting_on_gloo():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with count_collectives() as issued:
            expected = issue_each_kind()
        dist.barrier()
        assert len(issued) == expected, issued
        with count_collectives() as outer:
            dist.barrier()
            with count_collectives() as inner:
                dist.barrier()
        assert (outer, inner) == (["barrier", "barrier"], ["barrier"])
    finally:
        dist.destroy_process_group()


def test_the_private_group_of_torch_has_the_shape_we_rely_on():
    from torch.testing._internal.distributed.multi_threaded_pg import Collective, ProcessLocalGroup

    names = threaded_collectives()
    assert {"allreduce", "allgather", "broadcast", "reduce_scatter", "barrier", "alltoall"} <= set(names)
    assert {"all_to_all_single", "alltoall_base"} & set(names)
    assert not {name for name in names if name.startswith("__")} | {"size", "reset", "exception_handle"} & set(names)
    assert isinstance(ProcessLocalGroup._terminate, threading.Event)
    assert hasattr(ProcessLocalGroup, "_coll_lock")
    collective = Collective(2, None, ProcessLocalGroup)
    assert isinstance(collective._start_cond, threading.Condition)
    assert isinstance(collective._done_cond, threading.Condition)
