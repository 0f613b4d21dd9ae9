"""`MemoryWatch`: peak memory of a run, by phase and by class of tensors.

Of every step the peak of the device or process is known. What it consists of takes about ten microseconds an operator
to find out, and is measured while a training is built and in its first steps.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter

import torch

from moe_memory.config import MemoryConfig
from moe_memory.measure import IdleInput, MemoryAccount, Owner, Peak, PeakMemory
from moe_memory.unit_choice import is_named
from moe_parallel import gather_json
from moe_train.observe.record import MemoryRecord, PhaseMemory

# The first step makes what lives on, and offloads nothing yet; the second is as all that follow.
MEASURED_STEPS = 2


class MemoryWatch:
    """Memory of a rank.

    Phases by class are `build`, and of a step `forward`, `backward`, `reduce`, `update` and `rest`: what is in none of
    them, such as messages between stages of a pipeline.

    Attributes:
        device: that is watched.
        account: of tensors in the latest measured time.
        steps: that have begun in this process.
        largest_bytes: of the device or process, for `step` and everything that is `beside` steps.
        step_seconds: that the latest measured step took; None before its end.
        forward_seconds: that forwards took in it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.account = MemoryAccount(device)
        self.step_seconds: float | None = None
        self.forward_seconds = 0.0
        self._process = PeakMemory(device)
        self.steps = 0
        self.largest_bytes: dict[str, int] = {}
        self._is_open = False

    @property
    def step_bytes(self) -> int:
        """Peak of the device or process in the latest step."""
        return self._process.peaks_bytes["step"]

    @property
    def is_measured(self) -> bool:
        """Whether the latest step was measured by class."""
        return 0 < self.steps <= MEASURED_STEPS

    @property
    def is_last(self) -> bool:
        """Whether it is the last that is."""
        return self.steps == MEASURED_STEPS

    @property
    def when(self) -> str:
        """When the account was open the last time, in words."""
        if self.steps == 0:
            return "while the training was built"
        return f"in step {min(self.steps, MEASURED_STEPS)} of this process"

    @contextmanager
    def building(self) -> Iterator[None]:
        """While the training is built."""
        with self._measuring(), self.phase("build"):
            yield

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step."""
        self.steps += 1
        if self.is_measured:
            self.account.restart()
            self.step_seconds, self.forward_seconds = None, 0.0
        start = perf_counter()
        with self.beside("step"), self._measured_step() if self.is_measured else nullcontext():
            yield
        if self.is_measured:
            self.step_seconds = perf_counter() - start

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        """Around something else than a step, such as a validation."""
        with self._process.phase(name):
            yield
        self.largest_bytes[name] = max(self.largest_bytes.get(name, 0), self._process.peaks_bytes[name])

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around a part of what is measured; nothing elsewhere."""
        return self._phase(name) if self._is_open else nullcontext()

    def segment(self, kind: str, name: str) -> AbstractContextManager[None]:
        """Around a segment of a pass (`moe_parallel.pipeline.chunk.Around`)."""
        return self._segment(kind, name) if self._is_open else nullcontext()

    def phases(self) -> dict[str, PhaseMemory]:
        """What was measured last on this rank; the rest comes last."""
        peaks = sorted(self.account.peaks.items(), key=lambda item: item[0] == "rest")
        return {name: self._found(name, peak) for name, peak in peaks}

    def record(self, step: int, rank: int) -> MemoryRecord:
        """What was measured last on all ranks, in full that of the rank with most in tensors. Collective.

        Args:
            rank: of this process in the world.
        """
        rank_bytes = gather_json(max(peak.total_bytes for peak in self.account.peaks.values()))
        fullest = rank_bytes.index(max(rank_bytes))
        # The others send nothing, so that a thousand ranks send little.
        found = {name: vars(phase) for name, phase in self.phases().items()} if rank == fullest else None
        phases = {name: PhaseMemory(**phase) for name, phase in gather_json(found)[fullest].items()}
        source = self._process.source
        return MemoryRecord(step=step, source=source, rank=fullest, phases=phases, rank_bytes=rank_bytes)

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        self._is_open = True
        try:
            with self.account:
                yield
        finally:
            self._is_open = False

    @contextmanager
    def _measured_step(self) -> Iterator[None]:
        # Of the device or process the rest is what `step` is without the phases inside.
        with self._measuring(), self.account.phase("rest"):
            yield

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        with self._process.phase(name), self.account.phase(name):
            yield

    @contextmanager
    def _segment(self, kind: str, name: str) -> Iterator[None]:
        if kind == "forward":
            start = perf_counter()
            with self._phase("forward"), self.account.within(name):
                yield
            self.forward_seconds += perf_counter() - start
        else:
            with self._phase("backward"), self.account.backward(f"backward of {name}"):
                yield

    def _found(self, name: str, peak: Peak) -> PhaseMemory:
        process = self._process.alone_bytes
        return PhaseMemory(
            process_bytes=process["step" if name == "rest" else name if name in process else f"step/{name}"],
            tensor_bytes=peak.total_bytes,
            classes={str(kind): size_bytes for kind, size_bytes in peak.classes().items()},
            owners=[(*owner, size_bytes) for owner, size_bytes in by_unit(peak.owners)],
        )


def by_unit(owners: Mapping[Owner, int]) -> list[tuple[Owner, int]]:
    """Owners of which the same part of all layers is one, as `layers.*.experts`, the largest first."""
    found: dict[Owner, int] = {}
    for owner, size_bytes in owners.items():
        one = Owner(owner.kind, re.sub(r"\b(layers|mtp)\.\d+", r"\1.*", owner.name))
        found[one] = found.get(one, 0) + size_bytes
    return sorted(found.items(), key=lambda item: -item[1])


def too_small(inputs: Iterable[IdleInput], memory: MemoryConfig) -> dict[str, int]:
    """Units that `memory.offload` names and whose inputs all stay for their size: elements of the largest."""
    largest: dict[str, int] = {}
    for name, elements in inputs:
        if is_named(memory.offload, name):
            unit = name.rpartition(".")[2]
            largest[unit] = max(largest.get(unit, 0), elements)
    return {unit: elements for unit, elements in largest.items() if elements < memory.offload_min_elements}
