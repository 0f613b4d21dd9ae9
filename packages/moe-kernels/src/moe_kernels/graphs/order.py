"""What the order of uses says about memory: which uses share a captured graph, and which share buffers.

Graphs with one memory pool may overwrite each other's temporaries, and what an earlier one left for its backward: they
must be replayed in the order in which they were captured. An order falls into rounds, between which nothing is alive.
Rounds that look alike are replays of the same graphs; within a round every use has a graph of its own. Without a
pipeline a round is one microbatch, and with one it is the whole step.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from moe_kernels.errors import MoeKernelsError

Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Use:
    """One forward or backward of a callable, which is called once per microbatch."""

    name: str
    microbatch: int
    phase: Phase

    def __str__(self) -> str:
        return f"the {self.phase} of {self.name!r} in microbatch {self.microbatch}"


def rounds(order: Sequence[Use]) -> list[range]:
    """Places in the order of each round: as few uses as contain whole microbatches.

    Raises:
        MoeKernelsError: a use comes twice, or a backward without its forward, or a forward without its backward.
    """
    waiting: dict[tuple[str, int], Use] = {}
    done: set[Use] = set()
    for use in order:
        if use in done:
            raise MoeKernelsError(f"{use} comes twice; add a function that a microbatch uses twice under two names")
        done.add(use)
        key = (use.name, use.microbatch)
        if use.phase == "forward":
            waiting[key] = use
        elif waiting.pop(key, None) is None:
            raise MoeKernelsError(f"{use} comes before its forward")
    for use in waiting.values():
        raise MoeKernelsError(f"{use} has no backward; graphs are for what is differentiated in every microbatch")
    last = {use.microbatch: place for place, use in enumerate(order)}
    found, start, end = [], 0, -1
    for place, use in enumerate(order):
        end = max(end, last[use.microbatch])
        if place == end:
            found.append(range(start, place + 1))
            start = place + 1
    return found


def graph_places(order: Sequence[Use]) -> list[int]:
    """For each use the place of the one whose graph it replays: itself, or that in the first round of this look."""
    first: dict[tuple[tuple[str, int, Phase], ...], int] = {}
    places = []
    for part in rounds(order):
        number: dict[int, int] = {}
        uses = [order[place] for place in part]
        look = tuple((use.name, number.setdefault(use.microbatch, len(number)), use.phase) for use in uses)
        start = first.setdefault(look, part.start)
        places += [start + offset for offset in range(len(part))]
    return places


def buffer_slots(
    order: Sequence[Use], shapes: Mapping[str, Hashable] | None = None, read_before: Mapping[str, str] | None = None
) -> list[int]:
    """For each use the slot of the buffers that it writes: those that are free, lowest first.

    A forward takes buffers for inputs and outputs, which belong to it until its backward has run: who works on the
    outputs may keep them for his own backward. A backward takes buffers for gradients until they have been read. The
    two kinds are numbered apart.

    Args:
        shapes: of each callable; those with equal shapes share buffers. A callable that is left out shares with none.
        read_before: callable to callable, whose backward begins when all gradients that the first returned have been
            read. Without an entry they are kept until the backward of the microbatch is over: a sum over several
            readers of a tensor may wait for its other terms.

    Raises:
        MoeKernelsError: the order is none (`rounds`).
    """
    rounds(order)
    shapes, read_before = shapes or {}, read_before or {}
    place_of = {use: place for place, use in enumerate(order)}
    over = {use.microbatch: place for place, use in enumerate(order) if use.phase == "backward"}
    # Of each kind of buffers, for each slot the place of the first use that may take it again.
    free_from: dict[Hashable, list[int]] = {}
    slots = []
    for place, use in enumerate(order):
        if use.phase == "forward":
            free = place_of[Use(use.name, use.microbatch, "backward")] + 1
        else:
            reader = Use(read_before.get(use.name, use.name), use.microbatch, "backward")
            free = place_of.get(reader, place)
            # A backward takes its gradients in before it writes those it returns.
            free = free if free > place else over[use.microbatch] + 1
        kind = free_from.setdefault((use.phase, shapes.get(use.name, use.name), use.name in shapes), [])
        slot = next((slot for slot, earliest in enumerate(kind) if earliest <= place), len(kind))
        kind[slot : slot + 1] = [free]
        slots.append(slot)
    return slots
