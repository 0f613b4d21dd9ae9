"""Several ranks on one machine without a launcher: `run_distributed` forks them, for tests and for `moe-train verify`.

A forked process has torch imported already, so that four ranks over gloo start in a tenth of a second. Forking is not
possible once CUDA is initialised.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moe_parallel._torch_compat import file_store
from moe_parallel.collectives import CollectiveError, as_collective_error
from moe_parallel.errors import MoeParallelError
from moe_parallel.layout import ParallelLayout
from moe_parallel.mesh import FoldedMesh
from moe_parallel.world import RankError, explain

T = TypeVar("T")

# After one rank has failed the others may still say why they failed, which takes each up to half a second (`explain`).
_GRACE_S = 3.0


def run_distributed(
    layout: ParallelLayout,
    fn: Callable[[FoldedMesh], T],
    *,
    timeout_s: float = 30,
    limit_s: float = 120,
    **mesh: Any,
) -> list[T]:
    """Run `fn(mesh)` in one forked process per rank, over gloo, with one thread each; returns the results by rank.

    Results travel by pickle, tensors by value. No process is left behind, however the run ends.

    Args:
        timeout_s: of every collective.
        limit_s: of the whole run.
        mesh: further arguments of `FoldedMesh`.

    Raises:
        Exception: what the first failing rank raised, with a note that names the rank.
        MoeParallelError: a rank died or did not end in time; the message names it.
    """
    layout.check()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise MoeParallelError(
            "CUDA is initialised in this process, so it cannot fork ranks; use a launcher (torchrun)"
        )
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes: list[BaseProcess] = []
        pipes: list[Connection] = []
        try:
            for rank in range(layout.world):
                receiver, sender = context.Pipe(duplex=False)
                arguments = (rank, layout, fn, Path(folder) / "store", timeout_s, mesh, sender)
                processes.append(context.Process(target=_work, args=arguments, name=f"rank {rank}", daemon=True))
                processes[rank].start()
                sender.close()
                pipes.append(receiver)
            answers = _collect(processes, pipes, limit_s)
        finally:
            _end(processes)
            for pipe in pipes:
                pipe.close()
    return _results(layout.world, answers, limit_s)


def _work(
    rank: int,
    layout: ParallelLayout,
    fn: Callable[[FoldedMesh], Any],
    file: Path,
    timeout_s: float,
    mesh: dict[str, Any],
    pipe: Connection,
) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=timeout_s)
    answer: tuple[str, Any]
    store = file_store(file, layout.world)
    store.set_timeout(timeout)
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world, timeout=timeout)
        groups = FoldedMesh(layout, timeout_s=timeout_s, **mesh)
        # A rank that is done with a short function must not go while others still connect to it.
        dist.barrier()
        answer = ("result", fn(groups))
    except BaseException as raised:  # what test runners raise is no Exception; nothing may be lost in a process
        error = as_collective_error(raised)
        explain(error, store, rank=rank, world=layout.world)
        error.add_note(f"raised on {layout.words_for(rank)}")
        error.add_note("".join(traceback.format_tb(raised.__traceback__)).rstrip())
        answer = ("error", (time.monotonic(), _portable(error)))
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        data = pickle.dumps(answer)  # not `pipe.send`, which shares the memory of tensors with a process that ends now
    except Exception as error:
        words = f"rank {rank} returned {type(answer[1]).__name__}, which cannot be sent to the parent: {error}"
        data = pickle.dumps(("error", (time.monotonic(), MoeParallelError(words))))
    pipe.send_bytes(data)
    # Not sys.exit: the parent's exit handlers, such as those of a test runner, are not this process's to run. Groups
    # are not destroyed either: that may wait for peers which have failed.
    os._exit(0)


def _portable(error: BaseException) -> Exception:
    """The error, or one that says the same if this one does not survive the way to the parent, or would end it."""
    try:
        pickle.loads(pickle.dumps(error))
        assert isinstance(error, Exception)
        return error
    except Exception:
        copy = MoeParallelError(f"{type(error).__name__}: {error}")
        copy.__notes__ = list(error.__notes__)
        return copy


def _collect(processes: Sequence[BaseProcess], pipes: list[Connection], limit_s: float) -> dict[int, tuple[str, Any]]:
    """Answers by rank, until all have answered or ended, or one has failed and the others had their grace."""
    answers: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + limit_s
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes and (left := deadline - time.monotonic()) > 0:
        for ready in wait(list(open_pipes), timeout=left):
            assert isinstance(ready, Connection)
            rank = open_pipes.pop(ready)
            try:
                answers[rank] = pickle.loads(ready.recv_bytes())
            except (EOFError, OSError):  # before its answer, or amid it
                processes[rank].kill()
                processes[rank].join()
                answers[rank] = ("died", processes[rank].exitcode)
            if answers[rank][0] != "result":
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return answers


def _end(processes: Sequence[BaseProcess]) -> None:
    """End what still runs: ranks that have answered have nothing left to do, the others have had their time."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join()


def _results(world: int, answers: dict[int, tuple[str, Any]], limit_s: float) -> list[Any]:
    died = [
        f"rank {rank} died with exit code {_in_words(code)}"
        for rank, (kind, code) in sorted(answers.items())
        if kind == "died"
    ]
    errors = sorted(
        (
            (when, rank, error)
            for rank, (kind, content) in answers.items()
            if kind == "error"
            for when, error in [content]
        ),
        # Those that only tell of another rank come last.
        key=lambda entry: (isinstance(entry[2], RankError | CollectiveError), *entry[:2]),
    )
    if died:
        # A death explains the errors of the others, which only lost their peer.
        raise MoeParallelError("; ".join(died + [_text(rank, error) for _, rank, error in errors]))
    if errors:
        raise errors[0][2]
    silent = [str(rank) for rank in range(world) if rank not in answers]
    if silent:
        raise MoeParallelError(f"rank {', '.join(silent)} did not end within {limit_s:g} s")
    return [answers[rank][1] for rank in range(world)]


def _in_words(exit_code: int) -> str:
    return f"{exit_code} ({signal.Signals(-exit_code).name})" if exit_code < 0 else str(exit_code)


def _text(rank: int, error: Exception) -> str:
    if isinstance(error, CollectiveError):
        return "; ".join([str(error), *error.__notes__[:1]])  # names its rank; the first note is what others say
    return f"rank {rank}: {type(error).__name__}: {error}"
