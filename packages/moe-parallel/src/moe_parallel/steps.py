"""Steps: a computation as an ordered list that says which parts compute and which parts exchange.

A layer that is written as steps can be run from first to last (`run_steps`), or be cut at its exchanges so that
another microbatch computes while the bytes travel. The list is data: whoever runs it decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

S = TypeVar("S")


class StepKind(Enum):
    """What a step occupies: the device's arithmetic or its links."""

    COMPUTE = "compute"
    EXCHANGE = "exchange"


@dataclass(frozen=True)
class Step(Generic[S]):
    """One named part of a computation; `run` reads what earlier steps left in the state and leaves its own results."""

    name: str
    kind: StepKind
    run: Callable[[S], None]


def run_steps(steps: Sequence[Step[S]], state: S) -> S:
    """Run the steps in order on one state and return that state."""
    for step in steps:
        step.run(state)
    return state
