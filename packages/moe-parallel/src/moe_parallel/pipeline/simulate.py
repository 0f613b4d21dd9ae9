"""`simulate`: when every action of a schedule begins and ends, and how much of the time ranks wait."""

from collections.abc import Iterator
from dataclasses import dataclass

from moe_parallel.errors import MoeParallelError
from moe_parallel.pipeline.order import Output, Ranks, made, needed, walk
from moe_parallel.pipeline.placement import Placement
from moe_parallel.pipeline.schedule import Action, Pass


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Times of the passes through one chunk, in any unit.

    Attributes:
        forward: of a forward.
        input: of the gradient of the input.
        weight: of the gradients of the weights.
        backward: of a whole backward; None is `input + weight`.
        message: from the end of a pass until another rank has what it made; the sender does not wait.
    """

    forward: float = 1
    input: float = 1
    weight: float = 1
    backward: float | None = None
    message: float = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            least = "a number of at least 0" if name == "message" else "a number above 0"
            if value is not None and not (0 <= value < float("inf") and (value or name == "message")):
                raise MoeParallelError(f"the duration {name} is {value}; legal here: {least}")

    def of(self, what: Pass) -> float:
        """Time of a pass."""
        if what is Pass.FORWARD:
            return self.forward
        if what is Pass.INPUT:
            return self.input
        if what is Pass.WEIGHT:
            return self.weight
        return self.input + self.weight if self.backward is None else self.backward


@dataclass(frozen=True)
class Timed:
    """An action, when it begins and when it ends."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a schedule comes to. Every rank begins its first action as soon as it can, and the clock starts at 0.

    Attributes:
        ranks: the timed actions of each rank, in its order.
        durations: what the passes take.
    """

    ranks: tuple[tuple[Timed, ...], ...]
    durations: Durations

    @property
    def span(self) -> float:
        """From the first begin to the last end over all ranks."""
        return max((timed.end for actions in self.ranks for timed in actions), default=0.0)

    @property
    def busy(self) -> tuple[float, ...]:
        """Time that each rank works."""
        return tuple(sum(self.durations.of(timed.action.what) for timed in actions) for actions in self.ranks)

    @property
    def bubble(self) -> float:
        """Share of the span in which a rank does not work, mean over the ranks: idle / (idle + busy)."""
        total = self.span * len(self.ranks)
        return 1 - sum(self.busy) / total if total else 0.0

    @property
    def inner_bubble(self) -> float:
        """The largest share that a rank waits between the begin of its first and the end of its last action.

        Where steps follow each other without a barrier, the time before a rank's first action is lost only once.
        """
        shares = [
            1 - busy / (actions[-1].end - actions[0].start)
            for actions, busy in zip(self.ranks, self.busy, strict=True)
            if actions
        ]
        return max(shares, default=0.0)

    @property
    def held(self) -> tuple[int, ...]:
        """The most activations that each rank holds at once, each of one microbatch in one chunk.

        They are counted from the begin of the forward to the end of the last pass of the backward, although a gradient
        of the input already frees a part.
        """
        return tuple(max(_held(actions), default=0) for actions in self.ranks)

    def timeline(self) -> str:
        """One line for each rank; a column is as long as the shortest pass.

        `F3.1` begins a pass of several columns, which goes on as `-`; in a column with `.` the rank waits.
        """
        times = [timed for actions in self.ranks for timed in actions]
        if not times:
            return ""
        column = min(self.durations.of(timed.action.what) for timed in times)
        width = max(len(str(timed.action)) for timed in times)
        lines = []
        for rank, actions in enumerate(self.ranks):
            cells: list[str] = []
            for timed in actions:
                # Sums of durations are off by rounding.
                start, end = (int(time / column + 1e-6) for time in (timed.start, timed.end))
                cells += ["."] * (start - len(cells)) + [str(timed.action)]
                cells += ["-" * width] * (end - len(cells))
            row = " ".join(f"{cell:{width}}" for cell in cells).rstrip()
            lines.append(f"rank {rank:<{len(str(len(self.ranks) - 1))}}  {row}")
        return "\n".join(lines)


def simulate(ranks: Ranks, places: Placement, durations: Durations | None = None) -> Simulation:
    """Run the lists of all ranks on a clock.

    A rank begins an action when the one before it in its list has ended and what it needs from another stage is there.

    Raises:
        MoeParallelError: ranks wait for each other for ever.
    """
    durations = durations or Durations()
    timed: list[list[Timed]] = [[] for _ in ranks]
    there: dict[Output, tuple[int, float]] = {}
    for rank, action in walk(ranks, places):
        start = timed[rank][-1].end if timed[rank] else 0.0
        need, output = needed(action, rank, places), made(action, rank, places)
        if need:
            source, time = there[need]
            start = max(start, time if source == rank else time + durations.message)
        end = start + durations.of(action.what)
        timed[rank].append(Timed(action, start, end))
        if output:
            there[output] = rank, end
    return Simulation(ranks=tuple(map(tuple, timed)), durations=durations)


def _held(actions: tuple[Timed, ...]) -> Iterator[int]:
    held = 0
    for timed in actions:
        held += timed.action.what is Pass.FORWARD
        yield held
        held -= timed.action.what in (Pass.BACKWARD, Pass.WEIGHT)
