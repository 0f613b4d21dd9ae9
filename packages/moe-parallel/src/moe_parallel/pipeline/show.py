"""A schedule as text: who works when, how much of the time ranks wait, and what they hold."""

from moe_parallel.pipeline.formulas import bubble_formula
from moe_parallel.pipeline.schedules.table import schedule_named
from moe_parallel.pipeline.simulate import Durations, simulate


def describe_schedule(
    name: str, *, pp: int, num_microbatches: int, vpp: int = 1, durations: Durations | None = None
) -> str:
    """The timeline of a schedule and its figures; ASCII, one line for each rank.

    Raises:
        MoeParallelError: there is no such schedule, or it cannot be made with these numbers.
    """
    schedule = schedule_named(name)
    ranks = schedule.ranks(pp=pp, num_microbatches=num_microbatches, vpp=vpp)
    simulation = simulate(ranks, schedule.places(pp=pp, vpp=vpp), durations)
    formula = bubble_formula(name, pp=pp, num_microbatches=num_microbatches, vpp=vpp, durations=durations)
    beside = "no formula for these numbers" if formula is None else f"formula {formula:.4f}"
    passes = sum(simulation.busy) / pp
    lines = [
        f"{name}: {pp} ranks, {num_microbatches} microbatches, {vpp} {'chunk' if vpp == 1 else 'chunks'} of a rank",
        simulation.timeline(),
        "",
        f"time     {simulation.span:g}, of which a rank works {passes:g}",
        f"bubble   {simulation.bubble:.4f} of the time ({beside}); inside a rank's work {simulation.inner_bubble:.4f}",
        f"held     {_few(simulation.held)} activations at most, by rank, each of one microbatch in one chunk",
    ]
    return "\n".join(lines)


def _few(numbers: tuple[int, ...]) -> str:
    if len(numbers) > 16:
        return f"{', '.join(map(str, numbers[:8]))}, ... {numbers[-1]}"
    return ", ".join(map(str, numbers))
