"""Schedules: which pass of which microbatch comes when, as a list that can be printed and checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from moe_parallel.errors import MoeParallelError


class Pass(Enum):
    """What is done with a microbatch.

    A backward is made whole, or in two passes: first the gradient of the input, for which the stage before waits, and
    any time later the gradients of the weights, for which nobody waits (arXiv 2401.10241).
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    WEIGHT = "W"


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
    passes = (Pass.FORWARD, Pass.BACKWARD)
    return tuple(Action(what, number) for number in range(num_microbatches) for what in passes)


def check_schedule(actions: Sequence[Action], num_chunks: int) -> None:
    """Refuse a list in which a pass is missing, comes twice or before what it needs.

    Every chunk makes a forward and a backward, whole or in two passes, of the same microbatches, which are numbered
    from 0. Whether the lists of several ranks fit together says `moe_parallel.pipeline.order.check_ranks`.

    Raises:
        MoeParallelError: the message names the action.
    """
    done: dict[tuple[int, int], str] = {}
    for action in actions:
        if not 0 <= action.chunk < num_chunks:
            raise MoeParallelError(f"the schedule has {action}, but the number of chunks is {num_chunks}")
        if action.microbatch < 0:
            raise MoeParallelError(f"the schedule has {action}, but microbatches are numbered from 0")
        # What the list has of this microbatch and chunk so far, in order.
        before = done.get((action.microbatch, action.chunk), "")
        fault = _fault(action.what, before)
        if fault:
            raise MoeParallelError(f"the schedule has {action} {fault}")
        done[action.microbatch, action.chunk] = before + action.what.value
    microbatches = max((number for number, _ in done), default=-1) + 1
    for number in range(microbatches):
        for chunk in range(num_chunks):
            missing = _MISSING.get(done.get((number, chunk), ""))
            if missing:
                action = Action(missing, number, chunk)
                raise MoeParallelError(f"the schedule lacks {action}, and the number of microbatches is {microbatches}")


# Pass that is missing behind these.
_MISSING = {"": Pass.FORWARD, "F": Pass.BACKWARD, "FI": Pass.WEIGHT}


def _fault(what: Pass, before: str) -> str:
    if what.value in before:
        return "twice"
    if what is not Pass.FORWARD and "F" not in before:
        return "before its forward"
    if what is Pass.WEIGHT and "I" not in before and "B" not in before:
        return "before the gradient of its input"
    if what is not Pass.FORWARD and ("B" in before or (what is Pass.BACKWARD and "I" in before)):
        return "besides another backward"
    return ""
