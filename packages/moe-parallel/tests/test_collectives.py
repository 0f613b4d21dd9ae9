"""Collectives against plain sums and torch's own, on gloo and on the threaded group."""

import gc
import multiprocessing
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moe_parallel import (
    CollectiveError,
    MoeParallelError,
    ParallelLayout,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
    run_distributed,
)
from moe_parallel.collectives import describe_group, start
from moe_parallel.testing import count_collectives, run_threads

RANKS = 4


def on_gloo(fn, ranks=RANKS, **limits):
    return run_distributed(
        ParallelLayout(world=ranks, ep=ranks), lambda mesh: fn(mesh.rank("ep"), mesh.group("ep")), **limits
    )


def on_threads(fn, ranks=RANKS):
    return run_threads(ranks, lambda rank, groups: fn(rank, groups.group("ep")))


both = pytest.mark.parametrize("run", [pytest.param(on_gloo, marks=pytest.mark.dist), on_threads])


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32])
def test_every_collective_agrees_with_torchs_own(run, dtype):
    inputs = (torch.randn(RANKS, RANKS * 3, 2) * 100).to(dtype)

    def on_rank(rank, group):
        x = inputs[rank]
        # torch rounds bf16 after every addition, and adds in another order.
        close = {"rtol": 0.02, "atol": 2.0} if dtype == torch.bfloat16 else {}
        for op, name in ((dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.MAX, "max"), (dist.ReduceOp.MIN, "min")):
            want, got = x.clone(), x.clone()
            dist.all_reduce(want, op, group=group)
            assert all_reduce(got, group, name).wait() is got, "in place"
            assert torch.equal(got, want)
        gathered = [torch.empty_like(x) for _ in range(RANKS)]
        dist.all_gather(gathered, x, group=group)
        out = torch.empty(RANKS * x.shape[0], 2, dtype=dtype)
        assert torch.equal(all_gather(x, group).wait(), torch.cat(gathered))
        assert all_gather(x, group, out).wait() is out
        assert torch.equal(out, torch.cat(gathered))
        scattered = torch.empty(3, 2, dtype=dtype)
        dist.reduce_scatter(scattered, list(x.chunk(RANKS)), group=group)
        mine = reduce_scatter(x, group).wait()
        assert (mine.dtype, mine.shape) == (dtype, (3, 2))
        torch.testing.assert_close(mine, scattered, **close)
        sent, received = [3, 0, 4, 5], [[3, 0, 4, 5][rank]] * RANKS
        exchanged = torch.empty(sum(received), 2, dtype=dtype)
        dist.all_to_all_single(exchanged, x, received, sent, group=group)
        assert torch.equal(all_to_all(x, group, send_rows=sent, receive_rows=received).wait(), exchanged)

    run(on_rank)


@both
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("columns", [1, 1037])
def test_reduce_scatter_adds_in_the_order_of_the_ranks(run, dtype, columns):
    ranks = 8
    inputs = (torch.randn(ranks, ranks, columns) * 100).to(dtype)

    def on_rank(rank, group):
        return reduce_scatter(inputs[rank], group).wait()

    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    for part, result in enumerate(run(on_rank, ranks)):
        total = torch.zeros(columns, dtype=wide)
        for rank in range(ranks):
            total += inputs[rank, part].to(wide)
        assert torch.equal(result, total.to(dtype)[None]), "bit for bit, and low precision is rounded once"


@both
def test_zero_rows(run):
    def on_rank(rank, group):
        none = torch.empty(0, 3)
        assert all_gather(none, group).wait().shape == (0, 3)
        assert reduce_scatter(none, group).wait().shape == (0, 3)
        assert all_reduce(none, group).wait().shape == (0, 3)
        nothing = [0] * RANKS
        assert all_to_all(none, group, send_rows=nothing, receive_rows=nothing).wait().shape == (0, 3)
        # Only rank 1 has rows, and all are for rank 2.
        sent = [0, 0, 5, 0] if rank == 1 else nothing
        received = [0, 5, 0, 0] if rank == 2 else nothing
        rows = all_to_all(torch.full((sum(sent), 3), 7.0), group, send_rows=sent, receive_rows=received).wait()
        assert torch.equal(rows, torch.full((sum(received), 3), 7.0))

    run(on_rank)


@both
def test_rows_need_not_be_contiguous(run):
    inputs = torch.randn(RANKS, 5, RANKS * 2)

    def on_rank(rank, group):
        x = inputs[rank].t()
        assert torch.equal(all_gather(x, group).wait(), inputs.transpose(1, 2).flatten(0, 1))
        torch.testing.assert_close(reduce_scatter(x, group).wait(), inputs.sum(0).t()[rank * 2 : rank * 2 + 2])
        sent = [2] * RANKS
        rows = all_to_all(x, group, send_rows=sent, receive_rows=sent).wait()
        assert torch.equal(rows, torch.cat([other.t()[rank * 2 : rank * 2 + 2] for other in inputs]))

    run(on_rank)


@both
def test_one_call_is_one_collective(run):
    def on_rank(rank, group):
        with count_collectives() as issued:
            all_reduce(torch.ones(RANKS), group).wait()
            all_gather(torch.ones(RANKS), group).wait()
            reduce_scatter(torch.ones(RANKS), group).wait()
            all_to_all(torch.ones(RANKS), group, send_rows=[1] * RANKS, receive_rows=[1] * RANKS).wait()
        return len(issued)

    assert run(on_rank) == [4] * RANKS


STARTS = {
    "all_reduce": lambda group: all_reduce(torch.full((4,), 1.0), group),
    "all_gather": lambda group: all_gather(torch.full((2,), 2.0), group),
    "reduce_scatter": lambda group: reduce_scatter(torch.full((8,), 2.0), group),
    "all_to_all": lambda group: all_to_all(torch.full((4,), 4.0), group, send_rows=[2, 2], receive_rows=[2, 2]),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", STARTS)
def test_nothing_is_done_before_the_peer_has_come_and_nothing_waits_before_wait(name):
    called = multiprocessing.get_context("fork").Event()

    def on_rank(rank, group):
        if rank == 1:
            assert called.wait(10), "the call waits for the peer"
        pending = STARTS[name](group)
        early = pending.done()
        called.set()
        value = pending.wait()
        assert pending.done()
        assert pending.wait() is value
        return early, value

    (early, value), (_, other) = on_gloo(on_rank, 2)
    assert not early
    assert torch.equal(value, other)


@pytest.mark.dist
def test_buffers_stay_alive_while_bytes_travel():
    """The caller may drop what it gave, and the contiguous copy that was made of it, before the peer has come."""
    rows = 50_000

    def on_rank(rank, group):
        x = torch.arange(rows * 2, dtype=torch.float64).view(2, rows).t()  # a copy is sent
        half = [rows // 2] * 2
        pending = [
            all_to_all(x + rank, group, send_rows=half, receive_rows=half),
            reduce_scatter(x + rank, group),
            all_gather(x + rank, group),
        ]
        del x
        gc.collect()
        garbage = [torch.full((rows, 2), float("nan")) for _ in range(8)]  # takes what was freed
        if rank == 1:
            time.sleep(0.2)
        del garbage
        return [part.wait() for part in pending]

    x = torch.arange(rows * 2, dtype=torch.float64).view(2, rows).t()
    for rank, (exchanged, scattered, gathered) in enumerate(on_gloo(on_rank, 2)):
        mine = slice(rank * rows // 2, (rank + 1) * rows // 2)
        assert torch.equal(exchanged, torch.cat([x[mine], x[mine] + 1]))
        assert torch.equal(scattered, 2 * x[mine] + 1)
        assert torch.equal(gathered, torch.cat([x, x + 1]))


def test_what_this_rank_does_wrong_is_no_failure_of_the_group():
    def on_rank(rank, group):
        with pytest.raises(MoeParallelError, match="cuts dim 0 into 2 equal parts, but it has 3 entries"):
            reduce_scatter(torch.ones(3), group)
        for sent, received in (([1, 1], [1, 1]), ([3], [1, 2]), ([1, 2], [3])):
            with pytest.raises(MoeParallelError, match=r"group world of ranks 0, 1 takes one count .* all 3 rows") as e:
                all_to_all(torch.ones(3), group, send_rows=sent, receive_rows=received)
            assert not isinstance(e.value, CollectiveError)

    run_threads(2, lambda rank, groups: on_rank(rank, groups.group("ep")))


@pytest.mark.dist
def test_what_torch_refuses_to_start_is_no_failure_of_the_group():
    def on_rank(rank, group):
        with pytest.raises(
            MoeParallelError, match=r"all_reduce in group ep = etp \* ep of ranks 0, 1 cannot start"
        ) as e:
            all_reduce(torch.zeros(2, dtype=torch.complex64), group, "max")
        assert not isinstance(e.value, CollectiveError)
        return all_reduce(torch.ones(1), group).wait().item()

    assert on_gloo(on_rank, 2) == [2.0, 2.0], "and the group still works"


@pytest.mark.parametrize("kind", [torch.AcceleratorError, torch.OutOfMemoryError])
def test_what_fails_on_the_device_of_this_rank_is_no_lost_peer(kind):
    """CUDA tells of it late, in whatever is called next; as a lost peer it would hide behind what others then say."""

    def fail():
        raise kind("CUDA error: device-side assert triggered")

    def on_rank(rank, group):
        for issue in (fail, lambda: SimpleNamespace(wait=fail)):
            with pytest.raises(kind, match="device-side assert"):
                start("all_reduce", group, torch.ones(1), issue).wait()

    on_threads(on_rank, ranks=2)


@both
def test_an_all_reduce_in_place_needs_contiguous_memory(run):
    """Backends reduce memory as it lies, and would add up elements that do not belong together."""

    def on_rank(rank, group):
        for x in (torch.ones(2, 3).t(), torch.ones(4)[::2]):
            with pytest.raises(MoeParallelError, match=r"all_reduce in group .* needs contiguous memory"):
                all_reduce(x, group)
        return all_reduce(torch.ones(1), group).wait().item()

    assert set(run(on_rank)) == {float(RANKS)}, "and the group still works"


@pytest.mark.dist
@pytest.mark.parametrize("name", STARTS)
def test_what_failed_stays_failed(name):
    def on_rank(rank, group):
        if rank == 1:
            time.sleep(1.6)
            return
        pending = STARTS[name](group)
        for _ in range(2):
            with pytest.raises(CollectiveError, match=f"rank 0: {name} in group ep = .* of ranks 0, 1 failed after"):
                pending.wait()

    on_gloo(on_rank, 2, timeout_s=1)


@pytest.mark.dist
def test_names_of_groups_in_messages():
    def on_rank(mesh):
        return describe_group(mesh.group("dp")), describe_group(mesh.group("world"))

    names = run_distributed(ParallelLayout(world=4, tp=2, ep=2), on_rank)
    assert names[3] == ("group dp = cp * dp = edp = etp * edp of ranks 1, 3", "group world of ranks 0, 1, 2, 3")


def test_the_name_of_a_large_group_stays_short():
    assert run_threads(20, lambda rank, groups: describe_group(groups.group("ep")))[0] == (
        f"group world of ranks {', '.join(map(str, range(16)))} and 4 more"
    )
