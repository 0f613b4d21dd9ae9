"""Several ranks in one process, and what a test wants to know about them.

`run_threads` runs one thread per rank over torch's in-process group: milliseconds instead of seconds, with real
collectives and autograd. It needs no network, no fork and no test framework.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_parallel._torch_compat import (
    THREADED_BACKEND,
    in_memory_store,
    operator_mode,
    register_threaded_backend,
    stop_threaded_collectives,
    threaded_world,
)
from moe_parallel.errors import MoeParallelError
from moe_parallel.forked import run_distributed as run_distributed
from moe_parallel.groups import AxisGroups
from moe_parallel.layout import ParallelLayout

T = TypeVar("T")

# Operators of torch's communication namespaces that move nothing.
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_SILENT_OPERATORS = ("wait_tensor", "wrap_tensor_autograd")

_STOP_GRACE_S = 2.0
_one_run_at_a_time = threading.Lock()


def run_threads(world: int, fn: Callable[[int, AxisGroups], T], *, timeout_s: float = 60) -> list[T]:
    """Run `fn(rank, groups)` once per rank, each in its own thread, and return the results by rank.

    `groups` has the axes `ep` and `world`, both the whole world. Collectives of `torch.distributed`, functional
    collectives and their backward work, point-to-point calls do not. Threads share the process: random generators,
    default dtype and other global settings of torch are common to all ranks, so seed a generator per rank.

    A run always ends. If a rank fails, the ranks that wait for it end too. Ranks that wait for a rank that has
    returned, or for each other in different groups, or that meet in different collectives, are noticed at once.

    Raises:
        Exception: what the first failing rank (the lowest, of those that failed on their own) raised, with a note that
            names the rank.
        MoeParallelError: ranks wait for each other for ever or beyond `timeout_s`, or call different collectives; or
            runs are nested.
    """
    if world < 1:
        raise MoeParallelError(f"a world has at least one rank, not {world}")
    if not _one_run_at_a_time.acquire(blocking=False):
        raise MoeParallelError("run_threads cannot run inside, or at the same time as, another run_threads")
    try:
        register_threaded_backend(_observe)
        with threaded_world():
            return _run(world, fn, timeout_s)
    finally:
        _one_run_at_a_time.release()


@contextmanager
def count_collectives() -> Iterator[list[str]]:
    """Record every collective that the calling thread issues inside the context: torch's names, in order.

    Sees `torch.distributed` calls, functional collectives and what autograd issues in backward (on CPU backward runs
    in the calling thread), on gloo and on the group of `run_threads`. Each call counts once, whatever it is built
    of; waiting counts nothing.
    """
    names: list[str] = []
    _this_thread.records.append(names)
    try:
        # The threaded group is observed itself; torch's mode stack keeps flags that are common to all threads.
        with operator_mode(_call_operator) if _this_thread.ranks is None else nullcontext():
            yield names
    finally:
        _this_thread.records.remove(names)


def legal_layouts(world: int) -> Iterator[ParallelLayout]:
    """Every legal `ParallelLayout` of a world, in a fixed order."""
    for pp in ParallelLayout(world=world).legal_values("pp"):
        for tp in ParallelLayout(world=world, pp=pp).legal_values("tp"):
            for cp in ParallelLayout(world=world, pp=pp, tp=tp).legal_values("cp"):
                for etp in ParallelLayout(world=world, pp=pp).legal_values("etp"):
                    for ep in ParallelLayout(world=world, pp=pp, etp=etp).legal_values("ep"):
                        yield ParallelLayout(world=world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


@dataclass(frozen=True)
class _Call:
    """One rank inside one collective: the n-th of its group, which needs `size` ranks."""

    group: str
    number: int
    size: int
    name: str


class _Ranks:
    """Who waits for whom. Ranks are stuck as soon as every rank that still runs waits for one that cannot come."""

    def __init__(self, world: int) -> None:
        self.lock = threading.Lock()
        self.running = set(range(world))
        self.waiting: dict[int, _Call] = {}
        self.errors: dict[int, BaseException] = {}
        self.stopped: set[int] = set()  # ended because another rank failed
        self.stuck = ""
        self.abandoned = False  # a thread that ends later must leave the process's own groups alone
        self._calls_of: Counter[tuple[int, str]] = Counter()
        self._arrived: Counter[tuple[str, int]] = Counter()
        self._names: dict[tuple[str, int], str] = {}

    def enter(self, rank: int, group: ProcessGroup, name: str) -> None:
        with self.lock:
            label = group.group_name
            call = _Call(label, self._calls_of[rank, label], group.size(), name)
            first = self._names.setdefault((label, call.number), name)
            if name != first:
                raise MoeParallelError(
                    f"ranks disagree on collective {call.number} of a group: rank {rank} calls {name}, another {first}"
                )
            self._calls_of[rank, label] += 1
            self._arrived[label, call.number] += 1
            self.waiting[rank] = call
            self._stop_if_stuck()

    def leave(self, rank: int) -> None:
        with self.lock:
            del self.waiting[rank]

    def end(self, rank: int, error: BaseException | None) -> None:
        with self.lock:
            self.running.discard(rank)
            if error is not None:
                self.errors[rank] = error
                stop_threaded_collectives()
            else:
                self._stop_if_stuck()

    def _stop_if_stuck(self) -> None:
        incomplete = [
            rank
            for rank in self.running
            if (call := self.waiting.get(rank)) and self._arrived[call.group, call.number] < call.size
        ]
        if incomplete and len(incomplete) == len(self.running) and not self.errors and not self.stuck:
            self.stuck = "; ".join(f"rank {rank} waits in {self.waiting[rank].name}" for rank in sorted(incomplete))
            stop_threaded_collectives()


class _ThisThread(threading.local):
    def __init__(self) -> None:
        self.records: list[list[str]] = []
        self.depth = 0
        self.ranks: _Ranks | None = None
        self.rank = -1


_this_thread = _ThisThread()


@contextmanager
def _issue(name: str) -> Iterator[None]:
    """Record one collective, unless it is part of another that is recorded already."""
    if _this_thread.depth == 0:
        for names in _this_thread.records:
            names.append(name.strip("_"))
    _this_thread.depth += 1
    try:
        yield
    finally:
        _this_thread.depth -= 1


@contextmanager
def _observe(group: ProcessGroup, name: str) -> Iterator[None]:
    """Around every collective of the threaded group."""
    ranks, rank = _this_thread.ranks, _this_thread.rank
    with _issue(name):
        if ranks is None or rank in ranks.waiting:  # a collective inside a collective, such as a barrier's all-reduce
            yield
            return
        ranks.enter(rank, group, name)
        try:
            yield
        except SystemExit:
            ranks.stopped.add(rank)
            raise
        finally:
            ranks.leave(rank)


def _call_operator(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator; those through which groups other than the threaded one communicate are recorded."""
    name = operator._schema.name.partition("::")[2].strip("_")
    if operator.namespace in _NAMESPACES and name not in _SILENT_OPERATORS:
        with _issue(name):
            return operator(*args, **kwargs)
    return operator(*args, **kwargs)


def _run(world: int, fn: Callable[[int, AxisGroups], T], timeout_s: float) -> list[T]:
    ranks = _Ranks(world)
    results: dict[int, T] = {}
    store = in_memory_store()

    def work(rank: int) -> None:
        _this_thread.ranks, _this_thread.rank = ranks, rank
        error: BaseException | None = None
        try:
            dist.init_process_group(
                THREADED_BACKEND, rank=rank, world_size=world, store=store, timeout=timedelta(seconds=timeout_s)
            )
            try:
                results[rank] = fn(
                    rank, AxisGroups(dict.fromkeys(("ep", "world"), cast(ProcessGroup, dist.group.WORLD)))
                )
            finally:
                if not ranks.abandoned:
                    dist.destroy_process_group()
        except BaseException as caught:  # a rank may also end by SystemExit; nothing may be lost in a thread
            error = caught
        ranks.end(rank, error)

    threads = [threading.Thread(target=work, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    if not _join(threads, timeout_s):
        with ranks.lock:
            late = ", ".join(
                f"rank {rank} in {ranks.waiting[rank].name}" if rank in ranks.waiting else f"rank {rank}"
                for rank in sorted(ranks.running)
            )
        stop_threaded_collectives()
        ranks.abandoned = not _join(threads, _STOP_GRACE_S)
        if late and not ranks.errors.keys() - ranks.stopped:
            raise MoeParallelError(f"not all of {world} ranks ended within {timeout_s} s; still running: {late}")
    if ranks.stuck:
        ended = sorted(set(range(world)) - set(ranks.errors))
        raise MoeParallelError(
            f"a collective can never complete: {ranks.stuck}"
            + (f"; ranks {ended} have returned" if ended else ", not all in the same one")
        )
    for rank in sorted(ranks.errors.keys() - ranks.stopped):
        ranks.errors[rank].add_note(f"raised on rank {rank} of {world}")
        raise ranks.errors[rank]
    return [results[rank] for rank in range(world)]


def _join(threads: list[threading.Thread], timeout_s: float) -> bool:
    """Whether all threads ended in time."""
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
