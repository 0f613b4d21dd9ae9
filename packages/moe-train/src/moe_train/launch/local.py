"""`--nproc N`: several ranks on this machine, through torch's own launcher."""

import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_parallel.collectives import CollectiveError
from moe_parallel.layout import ParallelLayout
from moe_parallel.world import RankError
from moe_train.errors import MoeTrainError

# Errors that tell of another rank.
_CONSEQUENCES = tuple(f"{kind.__name__}: " for kind in (CollectiveError, RankError))
# They are consequences of what happened until so much later. Failures have their time in whole seconds, that of a rank
# which said nothing is the time at which the launcher looked.
_LATER_S = 5


class LaunchError(MoeTrainError):
    """A rank failed; the message names it and what it said."""


def launch(arguments: list[str], layout: ParallelLayout) -> None:
    """Run `moe-train ARGUMENTS` once per rank and wait; if one fails all are ended.

    As `torchrun --nproc-per-node N -m moe_train ARGUMENTS` does, on a free port of this machine. Unless OMP_NUM_THREADS
    says otherwise the cores are shared out among the ranks.

    Raises:
        LaunchError: a rank failed, or this process was told to end.
        KeyboardInterrupt: it was interrupted.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # It would report what happened in its own words, with paths of its own files.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    threads = max(1, (os.cpu_count() or 1) // layout.world)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=layout.world,
        run_id=f"moe-train-{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        elastic_launch(config, sys.executable)("-m", "moe_train", *arguments)
    except ChildFailedError as error:
        raise LaunchError(f"all ranks were ended after the first failure: {_first(error.failures, layout)}") from error
    except SignalException as error:
        if error.sigval is signal.SIGINT:
            raise KeyboardInterrupt from error
        raise LaunchError(f"ended by {error.sigval.name}, and all ranks with it") from error


def _first(failures: Mapping[int, Any], layout: ParallelLayout) -> str:
    """What failed first, with its place: no rank that was ended for it, and rather none that only tells of another."""
    said = {rank: _message(Path(failure.error_file)) for rank, failure in failures.items()}

    def order(rank: int) -> tuple[bool, int]:
        ended_by_launcher = said[rank] is None and failures[rank].exitcode == -signal.SIGTERM
        later_s = _LATER_S if (said[rank] or "").startswith(_CONSEQUENCES) else 0
        return ended_by_launcher, failures[rank].timestamp + later_s

    rank = min(failures, key=order)
    lines = (said[rank] or "").splitlines()
    # The rank itself has printed all of them; the last has its place.
    return (
        "; ".join(lines[:1] + lines[1:][-1:])
        or f"{layout.words_for(rank)} ended with {_ending(failures[rank].exitcode)}"
    )


def _message(file: Path) -> str | None:
    """What the rank has recorded (`worker`) if it had the time, with the place of the rank that it is about."""
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["message"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _ending(exit_code: int) -> str:
    return signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
