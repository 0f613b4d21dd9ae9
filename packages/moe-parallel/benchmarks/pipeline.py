"""How much of a step ranks of a pipeline wait, by schedule: simulated, by the closed formula, and measured.

    python packages/moe-parallel/benchmarks/pipeline.py

The bubble is idle / (idle + busy) over the whole step and all ranks. `inner` is the largest share that a rank waits
between its own first and last pass. Activations are counted in whole models' shares: one microbatch through all chunks
of a rank is 1; the figure is of the rank that holds most. F, I and W take one unit divided by the number of chunks, so
that all schedules do the same work, and messages take none. Exits with 1 if a simulation differs from its formula, or
the bytes that ranks send from theirs.

Measured is the runtime over forked ranks (gloo), whose passes sleep, so that it does not matter how many ranks a core
has. Of a step busy is the time that passes ask to sleep for, and all else is bubble: messages, the runtime, and what a
sleep takes longer.
"""

import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from moe_parallel import FoldedMesh, ParallelLayout, run_distributed
from moe_parallel.pipeline import messages as messages_module
from moe_parallel.pipeline.chunk import Report
from moe_parallel.pipeline.formulas import bubble_formula
from moe_parallel.pipeline.messages import Messages
from moe_parallel.pipeline.order import check_ranks
from moe_parallel.pipeline.placement import Placement
from moe_parallel.pipeline.runtime import run_actions
from moe_parallel.pipeline.schedule import Pass
from moe_parallel.pipeline.schedules.table import SCHEDULES, Schedule
from moe_parallel.pipeline.show import describe_schedule
from moe_parallel.pipeline.simulate import Durations, simulate

SIZES = ((2, 4), (4, 4), (4, 8), (4, 10), (8, 16), (8, 64), (16, 64), (64, 128))
CHUNKS = {"gpipe": (1,), "interleaved": (2, 4), "interleaved_zero_bubble": (2,), "zero_bubble_v": (2,)}
DIFFERENCE = 1e-9

# Of what is measured: ranks, microbatches, seconds of a pass through all chunks of a rank, features of a message, steps
# of which the fastest counts.
RANKS, MICROBATCHES, UNIT_S, FEATURES, STEPS = 4, 8, 0.04, 16_384, 2


@dataclass
class SleepingChunk:
    """A stage that works by the clock.

    Attributes:
        durations: seconds of the passes.
        slept: seconds that passes asked to sleep for.
    """

    durations: Durations
    slept: float = 0.0
    value: Tensor = field(default_factory=lambda: torch.zeros(FEATURES))

    def blank(self, microbatch: int, gradient: bool) -> Tensor | None:
        return self.value

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        return self._work(Pass.FORWARD)

    def backward(self, microbatch: int, gradient: Tensor | None, report: Report) -> Tensor | None:
        return self._work(Pass.BACKWARD)

    def backward_input(self, microbatch: int, gradient: Tensor | None, report: Report) -> Tensor | None:
        return self._work(Pass.INPUT)

    def backward_weight(self, microbatch: int, report: Report) -> None:
        self._work(Pass.WEIGHT)

    def _work(self, what: Pass) -> Tensor:
        self.slept += self.durations.of(what)
        time.sleep(self.durations.of(what))
        return self.value


def main() -> int:
    differ = simulated() + measured()
    print(describe_schedule("zero_bubble", pp=4, num_microbatches=8))
    return 1 if differ else 0


def simulated() -> int:
    differ = 0
    began = time.perf_counter()
    print("  pp  microbatches  schedule                 vpp    span  bubble  formula   inner  held")
    for pp, microbatches in SIZES:
        for name, schedule in SCHEDULES.items():
            for vpp in CHUNKS.get(name, (1,)):
                ranks = schedule.ranks(pp=pp, num_microbatches=microbatches, vpp=vpp)
                places = schedule.places(pp=pp, vpp=vpp)
                check_ranks(ranks, places)
                durations = Durations(forward=1 / vpp, input=1 / vpp, weight=1 / vpp)
                found = simulate(ranks, places, durations)
                formula = bubble_formula(name, pp=pp, num_microbatches=microbatches, vpp=vpp, durations=durations)
                wrong = formula is not None and abs(found.bubble - formula) > DIFFERENCE
                differ += wrong
                shown = "-" if formula is None else f"{formula:.4f}"
                print(
                    f"{pp:4}  {microbatches:12}  {name:23}  {vpp:3}  {found.span:6.1f}  {found.bubble:.4f}  "
                    f"{shown:>7}  {found.inner_bubble:.4f}  {max(found.held) / vpp:4g}{'  differs' if wrong else ''}"
                )
    print(f"\n{time.perf_counter() - began:.1f} s; {differ} simulations differ from their formula\n")
    return differ


def measured() -> int:
    differ = 0
    began = time.perf_counter()
    print(f"measured on {RANKS} ranks, {MICROBATCHES} microbatches, {UNIT_S * 1000:g} ms for each of F, I and W\n")
    print("schedule                 vpp  span ms  bubble  simulated  formula  KiB sent  formula")
    for name, schedule in SCHEDULES.items():
        for vpp in CHUNKS.get(name, (1,)):
            unit = UNIT_S / vpp
            durations = Durations(forward=unit, input=unit, weight=unit)
            places = schedule.places(pp=RANKS, vpp=vpp)
            span, busy, sent = step(schedule, places, durations)
            ranks = schedule.ranks(pp=RANKS, num_microbatches=MICROBATCHES, vpp=vpp)
            expected = simulate(ranks, places, durations).bubble
            formula = bubble_formula(name, pp=RANKS, num_microbatches=MICROBATCHES, vpp=vpp, durations=durations)
            shown = "-" if formula is None else f"{formula:.4f}"
            # Outputs there and gradients back, between stages that are on different ranks.
            crossing = sum(places.rank_of(n) != places.rank_of(n + 1) for n in range(places.num_stages - 1))
            bytes_sent = 2 * crossing * MICROBATCHES * FEATURES * 4
            differ += sent != bytes_sent
            print(
                f"{name:23}  {vpp:3}  {span * 1000:7.0f}  {1 - busy / span:.4f}  {expected:9.4f}  {shown:>7}  "
                f"{sent / 1024:8.0f}  {bytes_sent / 1024:7.0f}{'  differs' if sent != bytes_sent else ''}"
            )
    print(f"\n{time.perf_counter() - began:.1f} s; {differ} schedules send other bytes than their formula\n")
    return differ


def step(schedule: Schedule, places: Placement, durations: Durations) -> tuple[float, float, int]:
    """Seconds of the fastest step, mean seconds that its ranks work, and bytes that all of them send."""

    def on_rank(mesh: FoldedMesh) -> list[tuple[float, float, float, int]]:
        rank, sizes = mesh.rank("pp"), counted_messages()
        actions = schedule.order(places.pp, rank, MICROBATCHES, places.vpp)
        found = []
        for _ in range(STEPS):
            chunks = [SleepingChunk(durations) for _ in range(places.vpp)]
            messages = Messages(
                places,
                rank,
                there=mesh.group("pp"),
                back=mesh.group("pp_back"),
                there_down=mesh.group("pp_down"),
                back_up=mesh.group("pp_back_up"),
            )
            sizes.clear()
            dist.barrier()
            began = time.monotonic()
            run_actions(actions, chunks, lambda names, *, last: None, messages)
            found.append((began, time.monotonic(), sum(chunk.slept for chunk in chunks), sum(sizes)))
        return found

    by_rank = run_distributed(ParallelLayout(world=places.pp, pp=places.pp), on_rank)
    steps = []
    for ranks in zip(*by_rank, strict=True):
        begun, ended, slept, sent = zip(*ranks, strict=True)
        steps.append((max(ended) - min(begun), sum(slept) / len(slept), sum(sent)))
    return min(steps)


def counted_messages() -> list[int]:
    """A list that gets the bytes of every message that this process, a forked rank, sends from now on."""
    sizes: list[int] = []
    send = messages_module.send

    def counted(x: Tensor, group: dist.ProcessGroup, to: int) -> object:
        sizes.append(x.numel() * x.element_size())
        return send(x, group, to)

    messages_module.send = counted  # type: ignore[assignment]
    return sizes


if __name__ == "__main__":
    sys.exit(main())
