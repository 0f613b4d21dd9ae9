"""Joining through a launcher's environment, and what ranks tell each other."""

import json
import multiprocessing
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from moe_parallel import (
    CollectiveError,
    MoeParallelError,
    ParallelLayout,
    Place,
    RankError,
    agree,
    all_reduce,
    gather_json,
    joined,
    machines,
    run_distributed,
    together,
    world as world_module,
)
from moe_parallel._torch_compat import in_memory_store
from moe_parallel.collectives import as_collective_error
from moe_parallel.errors import described
from moe_parallel.testing import run_threads
from moe_parallel.world import explain

CPU = torch.device("cpu")
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def environment(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch.setenv


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_without_a_launcher_a_process_is_a_world_of_its_own(environment):
    assert Place.from_environment() == Place(rank=0, world=1, local_rank=0)
    environment("RANK", "3")  # some batch systems set it alone
    with joined(Place.from_environment(), device=CPU, timeout_s=1):
        assert not dist.is_initialized()


def test_a_launcher_says_the_place(environment):
    for variable, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        environment(variable, value)
    assert Place.from_environment() == Place(rank=5, world=8, local_rank=1)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set, but RANK is not; a launcher such as torchrun sets both"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "the environment variable WORLD_SIZE = 'two' is not a number"),
        ({"WORLD_SIZE": "2", "RANK": ""}, "the environment variable RANK = '' is not a number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK = 2 is outside a world of WORLD_SIZE = 2 processes"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK = -1 is outside a world of WORLD_SIZE = 2 processes"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "RANK = 0 is outside a world of WORLD_SIZE = 0 processes"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "2"}, "LOCAL_RANK = 2 is outside a world of 2 processes"),
    ],
)
def test_a_place_that_is_none_is_said_in_a_sentence(environment, variables, message):
    for variable, value in variables.items():
        environment(variable, value)
    with pytest.raises(MoeParallelError) as caught:
        Place.from_environment()
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MASTER_ADDR": "127.0.0.1"}, "MASTER_PORT"),
        ({"MASTER_PORT": "1"}, "MASTER_ADDR"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "http"}, "http"),
    ],
)
def test_a_wrong_rendezvous_is_said_in_a_sentence(environment, variables, words):
    for variable, value in variables.items():
        environment(variable, value)
    message = f"rank 1 of 2 could not join the others within 1 s: .*{words}"
    with pytest.raises(MoeParallelError, match=message), joined(Place(rank=1, world=2), device=CPU, timeout_s=1):
        pass


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_stays_alone_gives_up_in_time(environment, port, rank):
    environment("MASTER_ADDR", "127.0.0.1")
    environment("MASTER_PORT", str(port))
    start = time.monotonic()
    with (
        pytest.raises(MoeParallelError, match=f"rank {rank} of 2 could not join the others within 1 s: "),
        joined(Place(rank=rank, world=2), device=CPU, timeout_s=1),
    ):
        pass
    assert 0.9 < time.monotonic() - start < 8
    assert not dist.is_initialized()


def through_the_environment(ranks, port, fn, timeout_s=5, device=CPU):
    """Run `fn(rank)` in forked processes that join as those of a launcher do; results, or errors, by rank."""

    def on_rank(mesh):
        rank = dist.get_rank()
        dist.destroy_process_group()
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            with joined(Place.from_environment(), device=device, timeout_s=timeout_s):
                return fn(rank)
        except Exception as error:
            return error
        finally:
            assert not dist.is_initialized()

    return run_distributed(ParallelLayout(world=ranks), on_rank, timeout_s=20)


@pytest.mark.dist
def test_processes_join_through_the_environment(port):
    def on_rank(rank):
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (rank, 3, "gloo")
        return all_reduce(torch.tensor([1 << rank]), dist.group.WORLD).wait().item(), gather_json({"rank": rank})

    assert through_the_environment(3, port, on_rank) == [(7, [{"rank": 0}, {"rank": 1}, {"rank": 2}])] * 3


@pytest.mark.dist
def test_the_timeout_of_joining_is_that_of_collectives(port):
    ended = multiprocessing.get_context("fork").Event()

    def on_rank(rank):
        if rank == 1:
            ended.wait(20)  # alive, so that only the timeout can end the wait
            return None
        start = time.monotonic()
        with pytest.raises(CollectiveError, match="rank 0: all_reduce in group world of ranks 0, 1 failed after"):
            all_reduce(torch.ones(1), dist.group.WORLD).wait()
        ended.set()
        return time.monotonic() - start

    seconds, nothing = through_the_environment(2, port, on_rank, timeout_s=1)
    assert 0.9 < seconds < 15
    assert nothing is None


@pytest.mark.dist
@pytest.mark.parametrize("failing", [0, 1])
def test_of_a_lost_peer_the_others_learn_what_happened(port, failing):
    def on_rank(rank):
        if rank == failing:
            raise OSError("the disk is full")
        all_reduce(torch.ones(1), dist.group.WORLD).wait()

    errors = through_the_environment(2, port, on_rank)
    assert isinstance(errors[failing], OSError)
    assert isinstance(errors[1 - failing], CollectiveError)
    known = f"rank {failing} failed with OSError: the disk is full"
    assert errors[1 - failing].cause in [(failing, "OSError: the disk is full"), *([None] if failing == 0 else [])]
    # Without torchrun rank 0 serves the rendezvous, and may take along what it left there.
    gone = "the other ranks cannot be asked what happened: the process that served the rendezvous is gone"
    assert errors[1 - failing].__notes__[0] in ([known] if failing == 1 else [known, gone])


@pytest.mark.dist
def test_who_fails_on_a_gpu_leaves_without_waiting_and_who_does_not_in_order(port, monkeypatch):
    """Or NCCL would wait for collectives whose other ranks wait for this one, until its time is over."""
    left, join = [], dist.init_process_group
    for module, name in ((world_module, "abort_process_groups"), (dist, "destroy_process_group")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda name=name, original=original: (left.append(name), original()))
    without_gpu = {"cpu:gloo,cuda:nccl": "gloo"}
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **options: join(without_gpu.get(backend, backend), **options)
    )

    def on_rank(rank):
        left.clear()
        if rank == 1:
            raise KeyError(left)
        return left

    fine, failed = through_the_environment(2, port, on_rank, device=torch.device("cuda", 0))
    assert fine == ["destroy_process_group"]
    assert failed.args == (["abort_process_groups"],)


def test_messages_of_all_ranks_come_by_rank():
    values = [None, "ünïcödé 漢字 \ud800", {"long": "x" * 1_000_000}, [1.5, True, {"a": []}], float("inf")]
    results = run_threads(5, lambda rank, groups: gather_json(values[rank]))
    assert all(result == values for result in results)


@pytest.mark.dist
def test_long_and_short_messages_between_processes():
    def on_rank(mesh):
        rank = mesh.rank("world")
        said = gather_json("ä" * (300_000 * rank))
        return [len(text) for text in said], {*"".join(said)}

    assert run_distributed(ParallelLayout(world=3), on_rank) == [([0, 300_000, 600_000], {"ä"})] * 3


def test_a_world_of_one_says_what_several_would():
    assert not dist.is_initialized()
    value = {"a": (1, 2), 3: None}
    assert gather_json(value) == [json.loads(json.dumps(value))] == [{"a": [1, 2], "3": None}]


def test_machines_are_told_apart_by_name(monkeypatch):
    names = {0: "red", 1: "blue", 2: "red"}

    def on_rank(rank, groups):
        return machines(), machines(nvlink=True)

    monkeypatch.setattr(socket, "gethostname", lambda: names[dist.get_rank()])
    for found, with_nvlink in run_threads(3, on_rank):
        assert found.node_of == with_nvlink.node_of == with_nvlink.domain_of == (0, 1, 0)
        assert found.domain_of == (0, 1, 2)


@pytest.mark.dist
def test_ranks_of_this_machine_share_it():
    found = run_distributed(ParallelLayout(world=2), lambda mesh: machines())
    assert [topology.node_of for topology in found] == [(0, 0)] * 2
    agree(None)
    error = OSError("here")
    with pytest.raises(OSError, match="here") as caught:
        agree(error)
    assert caught.value is error


def test_a_failure_of_one_rank_is_a_failure_of_all():
    def on_rank(rank, groups):
        agree(None)
        try:
            agree(OSError("the disk is full") if rank == 2 else None, where=[f"dp={rank}"])
        except (OSError, RankError) as error:
            return type(error), str(error)

    told = (RankError, "rank 2: dp=2 OSError: the disk is full")
    assert run_threads(4, on_rank) == [told, told, (OSError, "the disk is full"), told]


def test_of_several_failures_all_are_told():
    def on_rank(rank, groups):
        try:
            agree(None if rank == 1 else ValueError(f"of {rank}"))
        except (ValueError, RankError) as error:
            return str(error)

    assert run_threads(3, on_rank) == ["of 0", "rank 0: ValueError: of 0; rank 2: ValueError: of 2", "of 2"]


@pytest.mark.dist
def test_a_rank_that_dies_before_it_agrees_does_not_leave_the_others_waiting():
    def on_rank(mesh):
        if mesh.rank("world") == 1:
            os._exit(3)
        agree(None)

    with pytest.raises(MoeParallelError, match=r"rank 1 died with exit code 3; rank 0: all_gather in group world"):
        run_distributed(ParallelLayout(world=2), on_rank, timeout_s=20)


@pytest.mark.dist
def test_a_peer_is_lost_in_a_collective_of_torch_too(port):
    """As `fully_shard` makes them: gloo raises what any operator might."""

    def on_rank(rank):
        if rank == 1:
            raise OSError("the disk is full")
        try:
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            error.add_note("in step 1")
            raise

    lost, _ = through_the_environment(2, port, on_rank)
    assert isinstance(lost, CollectiveError)
    assert str(lost).startswith("rank 0: a collective of torch's own failed: [")
    assert lost.__notes__ == ["in step 1", "rank 1 failed with OSError: the disk is full"]
    assert (lost.ranks, lost.cause) == ((0, 1), (1, "OSError: the disk is full"))


@pytest.mark.dist
def test_an_error_of_an_operator_is_no_lost_peer(port):
    found = through_the_environment(2, port, lambda rank: torch.ones(2) @ torch.ones(3))
    assert [type(error) for error in found] == [RuntimeError, RuntimeError]


def test_what_fails_before_there_are_ranks_stays_what_it_is():
    error = dist.DistStoreError("timed out")
    assert as_collective_error(error) is error


def test_the_cause_is_no_rank_that_tells_of_another():
    store, lost = in_memory_store(), CollectiveError("lost")
    for rank, error in enumerate((RankError("rank 1: OSError: disk full"), OSError("disk full"), lost)):
        explain(error, store, rank=rank, world=3)
    assert lost.cause == (1, "OSError: disk full")
    assert lost.__notes__ == ["rank 1 failed with OSError: disk full"]


@pytest.mark.dist
def test_together_makes_a_failure_of_one_body_a_failure_of_all():
    def on_rank(mesh):
        done = []
        try:
            with together():
                if mesh.rank("world") == 1:
                    raise ValueError("disk full")
                done.append(1)
        except (ValueError, RankError) as error:
            return type(error).__name__, str(error), done
        return None

    first, second = run_distributed(ParallelLayout(world=2), on_rank, timeout_s=10)
    assert first == ("RankError", "rank 1: ValueError: disk full", [1])
    assert second == ("ValueError", "disk full", [])


def test_together_in_a_world_of_one_is_the_body():
    with together():
        value = 1
    assert value == 1
    with pytest.raises(ValueError, match="disk full"), together():
        raise ValueError("disk full")


def test_notes_follow_an_error_on_its_line_or_on_lines_of_their_own():
    error = MoeParallelError("one")
    assert described(error) == "one"
    error.add_note("here")
    assert described(error) == "one; here"
    error.add_note("other: first\n  second")
    assert described(error) == "one\nhere\nother: first\n  second"
