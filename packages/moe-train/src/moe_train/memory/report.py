"""The report of a rank that ran out of memory: where, what filled it, what to change."""

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from moe_memory.measure import Peak
from moe_parallel import Groups
from moe_train.config.tree import TrainConfig
from moe_train.errors import MoeTrainError
from moe_train.memory.proposals import Measured, Proposal, ranked
from moe_train.memory.watch import MemoryWatch, by_unit

_WITHOUT_ACTIVATIONS = ("build", "reduce", "update")
_PROPOSALS = 3
_OWNERS = 5

# What allocators say; torch has a class of errors for those of devices only.
_SIGNS = (
    *("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory", "std::bad_alloc"),
    *("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"),
)
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class OutOfMemoryError(MoeTrainError):
    """Memory did not suffice; the message is the report."""


@contextmanager
def explained(watch: MemoryWatch, config: TrainConfig, groups: Groups, file: Path) -> Iterator[None]:
    """A body that runs out of memory raises, and leaves in the file, a report.

    Args:
        watch: of this rank.
        groups: this rank's place in the world.

    Raises:
        OutOfMemoryError: from what the allocator raised.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        try:
            report = out_of_memory_report(error, watch, config, world=groups.size("world"), stage=groups.rank("pp"))
        except Exception as failure:
            # What happened first must be told in any case.
            error.add_note(f"of which no report could be made: {type(failure).__name__}: {failure}")
            raise error from failure
        # A disk that is full as well does not stand between the report and who waits for it.
        with suppress(OSError):
            file.write_text(report + "\n", encoding="utf-8")
        raise OutOfMemoryError(report) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator could not give what was asked for."""
    known = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return known or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS))


def out_of_memory_report(
    error: BaseException, watch: MemoryWatch, config: TrainConfig, *, world: int, stage: int
) -> str:
    """Lines of text: what failed where, the classes and owners of the peak, and what to change.

    Args:
        error: its notes say where it happened.
        watch: of the rank that failed.
        stage: of that rank in the pipeline.
    """
    asked = _asked_bytes(error)
    peaks = watch.account.peaks
    phase = watch.account.failed_phase or max(peaks, key=lambda name: peaks[name].total_bytes, default="build")
    peak = peaks.get(phase, Peak())
    measured = Measured(
        peak=peak,
        seconds=watch.account.seconds,
        # A backward takes about twice as long as its forward.
        step_seconds=watch.step_seconds or 3 * watch.forward_seconds or None,
        on_device=watch.device.type != "cpu",
        stage=stage,
        other_bytes=max((peaks[name].total_bytes for name in _WITHOUT_ACTIVATIONS if name in peaks), default=0),
    )
    proposals = ranked(config, world, measured, least_bytes=asked or 0)[:_PROPOSALS]
    where = ", ".join(getattr(error, "__notes__", []))
    guess = "" if watch.step_seconds or not watch.forward_seconds else ", taken as three times its forward"
    lines = [
        f"out of memory {where or ('after a step' if watch.steps else 'before the first step')}",
        f"  {'error' if asked is None else f'asked for {_gib(asked)}'}: {_first_line(error)}",
        f"  {_capacity(watch.device)}",
        f"  most in tensors {watch.when}, in the phase {phase}: {_gib(peak.total_bytes)}",
        *(f"    {_gib(size):>12}  {kind}" for kind, size in peak.classes().items() if size),
        "  largest owners of these:",
        *(f"    {_gib(size):>12}  {owner.kind}: {owner.name}" for owner, size in by_unit(peak.owners)[:_OWNERS]),
        f"  changes that leave the loss as it is, by GiB for each percent of the time of a step{guess}:",
        *(_proposed(place, proposal) for place, proposal in enumerate(proposals, start=1)),
    ]
    if not proposals:
        lines.append("    none that this configuration allows: take more ranks, or a smaller model")
    return "\n".join(lines)


def _proposed(place: int, proposal: Proposal) -> str:
    costs = "costs were not measured" if proposal.costs_percent is None else f"costs {proposal.costs_percent:.2g} %"
    settings = " ".join(f"'{setting}'" for setting in proposal.settings)
    return f"    {place}. {settings}\n       saves {_gib(proposal.saves_bytes)}, {costs}: {proposal.why}"


def _asked_bytes(error: BaseException) -> int | None:
    found = re.search(r"allocate ([\d.]+) (bytes|[KMGT]iB)", str(error))
    return None if found is None else round(float(found[1]) * _UNITS[found[2]])


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _capacity(device: torch.device) -> str:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return f"{device} has {_gib(total)}, of which {_gib(free)} are free"
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        total, free = kilobytes["MemTotal"] * 1024, kilobytes["MemAvailable"] * 1024
    except (OSError, KeyError, ValueError, IndexError):
        return "this system does not say how much memory it has"
    machine = f"this machine has {_gib(total)}, of which {_gib(free)} are free"
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return machine
    return f"{machine}; this process may have {_gib(limit)} of addresses (ulimit -v)"


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3f} GiB"
