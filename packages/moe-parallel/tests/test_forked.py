"""run_distributed: every run ends in time, says who failed and how, and leaves no process behind."""

import os
import signal
import sys
import time
from contextlib import contextmanager

import pytest
import torch

from moe_parallel import (
    CollectiveError,
    MoeParallelError,
    ParallelLayout,
    all_gather,
    all_reduce,
    forked,
    run_distributed,
)

pytestmark = pytest.mark.dist

TIMEOUT_S = 1.0
FOUR = ParallelLayout(world=4, tp=2, ep=4)


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    """How long the run waits for what others have to say after a failure."""
    monkeypatch.setattr(forked, "_GRACE_S", 1.5)


@pytest.fixture
def ends(tmp_path):
    """A context that a run must leave within some seconds with its processes gone; each rank calls `here` first."""

    class Run:
        @staticmethod
        def here(mesh):
            (tmp_path / str(mesh.rank("world"))).write_text(str(os.getpid()))

        @contextmanager
        def __call__(self, *, within_s, ranks=4):
            start = time.monotonic()
            yield
            assert time.monotonic() - start < within_s
            pids = [int(file.read_text()) for file in tmp_path.iterdir()]
            assert len(set(pids)) == ranks
            for pid in pids:
                with pytest.raises(ProcessLookupError):
                    os.kill(pid, 0)

    return Run()


def test_results_come_by_rank(ends):
    def on_rank(mesh):
        ends.here(mesh)
        tensor = torch.full((3,), float(mesh.rank("world")), dtype=torch.bfloat16)
        return mesh.coordinates(), tensor, torch.get_num_threads()

    with ends(within_s=10):
        results = run_distributed(FOUR, on_rank)
    for rank, (coordinates, tensor, threads) in enumerate(results):
        assert coordinates == FOUR.coordinates(rank)
        assert torch.equal(tensor, torch.full((3,), float(rank), dtype=torch.bfloat16))
        assert threads == 1


def test_a_rank_that_raises_ends_all_and_is_named(ends):
    def on_rank(mesh):
        ends.here(mesh)
        if mesh.rank("world") == 2:
            raise KeyError("lost")
        all_reduce(torch.ones(1), mesh.group("ep")).wait()

    with ends(within_s=8), pytest.raises(KeyError, match="lost") as caught:
        run_distributed(FOUR, on_rank, timeout_s=60)  # the others notice that it has gone, and do not wait so long
    where, trace = caught.value.__notes__
    assert where == "raised on rank 2 of 4 (tp=0 dp=1 ep=2)"
    assert 'raise KeyError("lost")' in trace


def test_a_rank_that_is_killed_is_named_together_with_what_the_others_were_doing(ends):
    def on_rank(mesh):
        ends.here(mesh)
        if mesh.rank("world") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce(torch.ones(1), mesh.group("ep")).wait()

    with ends(within_s=10), pytest.raises(MoeParallelError) as caught:
        run_distributed(FOUR, on_rank, timeout_s=TIMEOUT_S)
    message = str(caught.value)
    assert message.startswith("rank 1 died with exit code -9 (SIGKILL); rank ")
    assert "all_reduce in group ep = etp * ep of ranks 0, 1, 2, 3 failed after" in message
    # Rank 3 is no neighbour of rank 1 in the ring, and notices when the others have gone.
    assert "no report from ranks 1, 3: dead, still waiting, or busy with something else" in message


def test_a_rank_that_does_not_come_is_named(ends):
    def on_rank(mesh):
        ends.here(mesh)
        if mesh.rank("world") == 3:
            time.sleep(60)
        all_reduce(torch.ones(1), mesh.group("dp")).wait()

    with ends(within_s=TIMEOUT_S + 7), pytest.raises(CollectiveError) as caught:
        run_distributed(FOUR, on_rank, timeout_s=TIMEOUT_S)
    assert "rank 1: all_reduce in group dp = cp * dp of ranks 1, 3 failed after" in str(caught.value)
    assert caught.value.__notes__[:2] == [
        # Ranks 0 and 2, of another group, have returned.
        "no report from rank 3: dead, still waiting, or busy with something else",
        "raised on rank 1 of 4 (tp=1 dp=0 ep=1)",
    ]


def test_ranks_in_different_collectives_end_in_time(ends):
    def on_rank(mesh):
        ends.here(mesh)
        if mesh.rank("world") == 0:
            all_gather(torch.ones(4), mesh.group("ep")).wait()
        else:
            all_reduce(torch.ones(4), mesh.group("ep")).wait()

    with ends(within_s=TIMEOUT_S + 7), pytest.raises(MoeParallelError) as caught:
        run_distributed(FOUR, on_rank, timeout_s=TIMEOUT_S)
    assert "in group ep = etp * ep of ranks 0, 1, 2, 3 failed after" in str(caught.value)


def test_ranks_in_different_groups_end_in_time(ends):
    def on_rank(mesh):
        ends.here(mesh)
        axes = ("tp",) if mesh.rank("world") == 0 else ("ep",)
        all_reduce(torch.ones(4), mesh.group(*axes)).wait()

    with ends(within_s=TIMEOUT_S + 7), pytest.raises(CollectiveError, match=r"of ranks 0, 1.* failed after"):
        run_distributed(FOUR, on_rank, timeout_s=TIMEOUT_S)


def test_a_run_that_takes_too_long_is_ended(ends):
    def on_rank(mesh):
        ends.here(mesh)
        if mesh.rank("world") in (1, 3):
            time.sleep(60)

    with ends(within_s=8), pytest.raises(MoeParallelError, match=r"^rank 1, 3 did not end within 1 s$"):
        run_distributed(FOUR, on_rank, limit_s=1)


def test_the_cause_is_raised_and_not_what_followed_from_it(ends):
    """The cause comes last here: rank 0 loses rank 1 before that fails with its own error."""

    def on_rank(mesh):
        ends.here(mesh)
        if mesh.rank("world") == 0:
            all_reduce(torch.ones(1), mesh.group("ep")).wait()
        time.sleep(TIMEOUT_S + 0.8)
        raise OSError("the disk is full")

    with ends(within_s=TIMEOUT_S + 7, ranks=2), pytest.raises(OSError, match="the disk is full") as caught:
        run_distributed(ParallelLayout(world=2, ep=2), on_rank, timeout_s=TIMEOUT_S)
    assert "raised on rank 1 of 2 (dp=1 ep=1)" in caught.value.__notes__


class StubbornError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        (lambda: StubbornError("this", "that"), "StubbornError: this and that"),  # pickles, but does not come back
        (lambda: OSError(2, "gone", lambda: None), "FileNotFoundError: "),  # does not pickle
        (lambda: SystemExit(0), "SystemExit: 0"),
        (lambda: pytest.fail.Exception("a test runner's own"), "Failed: a test runner's own"),
    ],
)
def test_every_kind_of_error_arrives(fail, message):
    def on_rank(mesh):
        if mesh.rank("world") == 1:
            raise fail()

    with pytest.raises(MoeParallelError, match=message) as caught:
        run_distributed(ParallelLayout(world=2, ep=2), on_rank)
    assert caught.value.__notes__[0] == "raised on rank 1 of 2 (dp=1 ep=1)"


def test_a_result_that_cannot_travel_is_an_error():
    with pytest.raises(MoeParallelError, match="rank 0 returned function, which cannot be sent to the parent: "):
        run_distributed(ParallelLayout(world=1), lambda mesh: lambda: None)


def test_a_rank_that_exits_is_named():
    with pytest.raises(MoeParallelError, match=r"^rank 1 died with exit code 7"):
        run_distributed(ParallelLayout(world=2, ep=2), lambda mesh: mesh.rank("ep") and os._exit(7))


def test_what_a_rank_prints_is_seen_once(capfd):
    def on_rank(mesh):
        sys.stdout = os.fdopen(os.dup(1), "w", buffering=8192)  # as if it went into a pipe
        sys.stdout.write(f"rank{mesh.rank('ep')} ")

    sys.stdout.write("parent ")
    run_distributed(ParallelLayout(world=2, ep=2), on_rank)
    assert sorted(capfd.readouterr().out.split()) == ["parent", "rank0", "rank1"]


def test_what_cannot_run_is_refused_before_a_process_starts(monkeypatch):
    def on_rank(mesh):
        raise AssertionError("started")

    with pytest.raises(MoeParallelError, match=r"parallel\.ep = 3"):
        run_distributed(ParallelLayout(world=4, ep=3), on_rank)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(MoeParallelError, match="CUDA is initialised in this process, so it cannot fork"):
        run_distributed(ParallelLayout(world=4), on_rank)
