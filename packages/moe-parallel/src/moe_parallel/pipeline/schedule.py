"""Schedules: which pass of which microbatch comes when, as a list that can be printed and checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from moe_parallel.errors import MoeParallelError


class Pass(Enum):
    """What is done with a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One pass of one microbatch through one chunk of layers; printed as `F3`, or `F3.1` in chunk 1."""

    what: Pass
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.what.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


def one_by_one(num_microbatches: int) -> tuple[Action, ...]:
    """Forward and backward of each microbatch before the next: `F0 B0 F1 B1 ...`, the schedule without a pipeline."""
    return tuple(Action(what, number) for number in range(num_microbatches) for what in (Pass.FORWARD, Pass.BACKWARD))


def check_schedule(actions: Sequence[Action], num_chunks: int) -> None:
    """Refuse a list in which a pass is missing, comes twice or before what it needs.

    Every chunk makes both passes of the same microbatches, which are numbered from 0.

    Raises:
        MoeParallelError: the message names the action.
    """
    done: set[Action] = set()
    for action in actions:
        if not 0 <= action.chunk < num_chunks:
            raise MoeParallelError(f"the schedule has {action}, but the number of chunks is {num_chunks}")
        if action.microbatch < 0:
            raise MoeParallelError(f"the schedule has {action}, but microbatches are numbered from 0")
        if action in done:
            raise MoeParallelError(f"the schedule has {action} twice")
        if action.what is Pass.BACKWARD and Action(Pass.FORWARD, action.microbatch, action.chunk) not in done:
            raise MoeParallelError(f"the schedule has {action} before its forward")
        done.add(action)
    microbatches = max((action.microbatch for action in actions), default=-1) + 1
    for action in (
        Action(what, number, chunk) for number in range(microbatches) for chunk in range(num_chunks) for what in Pass
    ):
        if action not in done:
            raise MoeParallelError(f"the schedule lacks {action}, and the number of microbatches is {microbatches}")
