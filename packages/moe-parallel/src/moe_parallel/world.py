"""The ranks of one run: how a process joins them, and what they tell each other when something fails.

A launcher such as torchrun tells a process its place in environment variables (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`,
`MASTER_ADDR`, `MASTER_PORT`); without them a process is a world of its own.
"""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from moe_parallel._torch_compat import abort_process_groups
from moe_parallel.collectives import CollectiveError, all_gather, as_collective_error
from moe_parallel.errors import MoeParallelError, described
from moe_parallel.topology import Topology

# How long a failing rank waits for what the others have to say about it. It holds its connections meanwhile, so that
# those who wait for it learn that something is wrong so much later.
_REPORT_WAIT_S = 0.5

# A message names so many ranks.
_MOST_NAMES = 16


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a launcher has put this process.

    Attributes:
        rank: 0 <= rank < world.
        world: number of processes.
        local_rank: number of this process on its machine.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> "Place":
        """What the launcher says; the only process of its world where there is none.

        Raises:
            MoeParallelError: it says something that is no place.
        """
        if "WORLD_SIZE" not in os.environ:
            return cls()
        place = cls(rank=_number("RANK"), world=_number("WORLD_SIZE"), local_rank=_number("LOCAL_RANK", "0"))
        if not 0 <= place.rank < place.world:
            raise MoeParallelError(f"RANK = {place.rank} is outside a world of WORLD_SIZE = {place.world} processes")
        if not 0 <= place.local_rank < place.world:
            raise MoeParallelError(f"LOCAL_RANK = {place.local_rank} is outside a world of {place.world} processes")
        return place


def _number(variable: str, default: str | None = None) -> int:
    text = os.environ.get(variable, default)
    if text is None:
        raise MoeParallelError(f"WORLD_SIZE is set, but {variable} is not; a launcher such as torchrun sets both")
    try:
        return int(text)
    except ValueError as error:
        raise MoeParallelError(f"the environment variable {variable} = {text!r} is not a number") from error


@contextmanager
def joined(place: Place, *, device: torch.device, timeout_s: float) -> Iterator[None]:
    """Be part of the default process group while the context is open; nothing to do in a world of one.

    Collectives over CPU tensors use gloo, those over CUDA tensors NCCL. If the body raises, the other ranks can read
    why (`explain`).

    Raises:
        MoeParallelError: the ranks did not find each other in time.
        CollectiveError: in place of what torch raises where a peer is lost in a collective of its own.
    """
    if place.world == 1:
        yield
        return
    # Bound to no device, which would make one queue of a group on NCCL, whoever sends to whom (`Messages`).
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_s)
    try:
        store, _, _ = next(rendezvous("env://", place.rank, place.world, timeout=timeout))
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.world, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise MoeParallelError(
            f"rank {place.rank} of {place.world} could not join the others within {timeout_s:g} s: {error}"
        ) from error
    # NCCL leaves when all it has begun is over, and so waits for peers that wait for a rank that failed.
    leave = abort_process_groups if device.type == "cuda" else dist.destroy_process_group
    try:
        yield
        leave = dist.destroy_process_group
    except Exception as error:
        failure = as_collective_error(error)
        explain(failure, store, rank=place.rank, world=place.world)
        if failure is error:
            raise
        raise failure from error
    finally:
        leave()


def explain(error: BaseException, store: Any, *, rank: int, world: int) -> None:
    """Tell the other ranks what ended this one, and add what they said to the error as a note.

    Of a collective that failed the note has what failed elsewhere, the first of which becomes the `cause` of the error,
    or else names the members of the group that have not reported any failure: they died without a word, still wait for
    a peer, or are busy with something else.
    """
    lost = isinstance(error, CollectiveError | RankError)
    try:
        store.set(_key(rank), json.dumps({"lost": lost, "text": f"{type(error).__name__}: {described(error)}"}))
        if isinstance(error, CollectiveError):
            reports = _reports(store, [other for other in range(world) if other != rank])
            causes = {other: report["text"] for other, report in sorted(reports.items()) if not report["lost"]}
            error.cause = next(iter(causes.items()), None)
            silent = [peer for peer in error.ranks if peer != rank and peer not in reports]
            error.add_note(_what_others_say(causes, silent))
    except RuntimeError:
        error.add_note("the other ranks cannot be asked what happened: the process that served the rendezvous is gone")


def _what_others_say(causes: Mapping[int, str], silent: Sequence[int]) -> str:
    if causes:
        return "; ".join(f"rank {other} failed with {text.splitlines()[0][:2000]}" for other, text in causes.items())
    if silent:
        names = ("ranks " if len(silent) > 1 else "rank ") + ", ".join(map(str, silent[:_MOST_NAMES]))
        more = f" and {len(silent) - _MOST_NAMES} more" if len(silent) > _MOST_NAMES else ""
        return f"no report from {names}{more}: dead, still waiting, or busy with something else"
    return "every other rank of the group lost its peers as well"


def _reports(store: Any, ranks: list[int]) -> dict[int, dict[str, Any]]:
    """What ranks have reported: as soon as all have, or one knows the cause, or the wait is over."""
    reports: dict[int, dict[str, Any]] = {}
    deadline = time.monotonic() + _REPORT_WAIT_S
    while True:
        for rank in ranks:
            if rank not in reports and store.check([_key(rank)]):
                reports[rank] = json.loads(store.get(_key(rank)))
            if time.monotonic() > deadline:  # a large world may take that long to ask once
                return reports
        if len(reports) == len(ranks) or any(not report["lost"] for report in reports.values()):
            return reports
        time.sleep(0.05)


def _key(rank: int) -> str:
    return f"moe_parallel/failure/{rank}"


def gather_json(value: Any) -> list[Any]:
    """The JSON values of all ranks of the world, by rank. Collective.

    For control messages, not for tensors: every rank receives the text of all, each padded to the longest.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [json.loads(json.dumps(value))]
    world = dist.group.WORLD
    assert world is not None
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = all_gather(torch.tensor([text.numel()]), world).wait().tolist()
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: text.numel()] = text
    rows = all_gather(padded, world).wait().view(len(sizes), -1)
    return [json.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]


def machines(*, nvlink: bool = False) -> Topology:
    """Which ranks share a machine, as the names of their machines say. Collective.

    Args:
        nvlink: the ranks of a machine are one NVLink domain.
    """
    return Topology.from_hosts(gather_json(socket.gethostname()), nvlink=nvlink)


class RankError(MoeParallelError):
    """Something failed on another rank, or on several; the message names them and what they said."""


def agree(error: Exception | None, *, where: Sequence[str] = ()) -> None:
    """Make a failure on one rank a failure on all. Collective: every rank calls it after a step that may fail alone.

    Args:
        error: what happened here, or None.
        where: further words about this rank for the message, such as its coordinates.

    Raises:
        Exception: the error of this rank.
        RankError: nothing happened here, but elsewhere.
    """
    text = None if error is None else f"{' '.join([*where, type(error).__name__])}: {error}"
    said = gather_json(text)
    if error is not None:
        raise error
    failures = [f"rank {rank}: {words}" for rank, words in enumerate(said) if words is not None]
    if failures:
        raise RankError("; ".join(failures))


@contextmanager
def together() -> Iterator[None]:
    """What fails in the body on one rank fails on all, as `agree` says. Collective, after the body."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    agree(failed)
