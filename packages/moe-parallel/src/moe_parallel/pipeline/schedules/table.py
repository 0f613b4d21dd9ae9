"""`SCHEDULES`: every schedule by name, with what it needs."""

from collections.abc import Callable
from dataclasses import dataclass

from moe_parallel.errors import MoeParallelError
from moe_parallel.pipeline.placement import Placement, PlacementKind
from moe_parallel.pipeline.schedule import Action
from moe_parallel.pipeline.schedules.interleaved import interleaved, interleaved_zero_bubble, zero_bubble
from moe_parallel.pipeline.schedules.one_chunk import gpipe, one_f_one_b
from moe_parallel.pipeline.schedules.zero_bubble_v import zero_bubble_v
from moe_parallel.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule and what it needs; every number of microbatches from 1 is legal.

    Attributes:
        name: its key in `SCHEDULES`.
        order: (pp, rank, number of microbatches, chunks of the rank) to the actions of the rank.
        min_vpp: fewest chunks of a rank.
        max_vpp: most chunks of a rank; None is any number.
        placement: where the stages are (`Placement.kind`).
        splits_backward: gradients of inputs and of weights are made in two passes.
    """

    name: str
    order: Callable[[int, int, int, int], tuple[Action, ...]]
    min_vpp: int = 1
    max_vpp: int | None = None
    placement: PlacementKind = "loop"
    splits_backward: bool = False

    def problems(self, *, pp: int, num_microbatches: int, vpp: int = 1) -> list[Problem]:
        """Every violated rule, in a fixed order; empty where the schedule can be made."""
        found = [
            Problem(key=key, value=value, rule=f"{what} is an integer of at least 1")
            for key, value, what in (
                ("parallel.pp", pp, "the number of pipeline ranks"),
                ("num_microbatches", num_microbatches, "the number of microbatches of a step"),
            )
            if value < 1
        ]
        if not self.takes(vpp):
            legal = f"{self.min_vpp} or more" if self.max_vpp is None else f"{self.min_vpp} to {self.max_vpp}"
            if self.min_vpp == self.max_vpp:
                legal = str(self.min_vpp)
            fitting = [schedule.name for schedule in SCHEDULES.values() if schedule.takes(vpp)]
            found.append(
                Problem(
                    key="parallel.vpp",
                    value=vpp,
                    rule=f"the schedule {self.name} does not work with so many chunks of a rank",
                    legal=legal,
                    next_step=f"Schedules for {vpp}: {', '.join(fitting)}" if fitting else "",
                )
            )
        return found

    def takes(self, vpp: int) -> bool:
        """Whether it works with so many chunks of a rank."""
        return self.min_vpp <= vpp and (self.max_vpp is None or vpp <= self.max_vpp)

    def places(self, *, pp: int, vpp: int = 1) -> Placement:
        """Where the stages are under this schedule."""
        return Placement(kind=self.placement, pp=pp, vpp=vpp)

    def ranks(self, *, pp: int, num_microbatches: int, vpp: int = 1) -> tuple[tuple[Action, ...], ...]:
        """The actions of every rank.

        Raises:
            MoeParallelError: the schedule cannot be made; the message has every violated rule, one a line.
        """
        found = self.problems(pp=pp, num_microbatches=num_microbatches, vpp=vpp)
        if found:
            raise MoeParallelError("\n".join(map(str, found)))
        return tuple(self.order(pp, rank, num_microbatches, vpp) for rank in range(pp))


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="gpipe", order=gpipe),
        Schedule(name="one_f_one_b", order=one_f_one_b, max_vpp=1),
        Schedule(name="interleaved", order=interleaved),
        Schedule(name="zero_bubble", order=zero_bubble, max_vpp=1, splits_backward=True),
        Schedule(name="interleaved_zero_bubble", order=interleaved_zero_bubble, splits_backward=True),
        Schedule(name="zero_bubble_v", order=zero_bubble_v, min_vpp=2, max_vpp=2, placement="v", splits_backward=True),
    )
}


def schedule_named(name: str) -> Schedule:
    """The schedule of a name.

    Raises:
        MoeParallelError: there is none; the message lists the names.
    """
    if name not in SCHEDULES:
        problem = Problem(
            key="parallel.schedule", value=name, rule="there is no such schedule", legal=", ".join(SCHEDULES)
        )
        raise MoeParallelError(str(problem))
    return SCHEDULES[name]
