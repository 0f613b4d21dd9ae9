"""ZB-V: two chunks of each rank in the shape of a V, so that the rank that begins a microbatch also ends it."""

from collections import Counter

from moe_parallel.pipeline.schedule import Action, Pass

_F, _I, _W = Pass.FORWARD, Pass.INPUT, Pass.WEIGHT


def zero_bubble_v(pp: int, rank: int, num_microbatches: int, num_chunks: int) -> tuple[Action, ...]:
    """ZB-V (arXiv 2401.10241, section 6): no rank waits between its passes if F, I and W take equally long.

    Placement `v` with two chunks. A rank holds at most two activations for each rank, each of half of its layers, as
    much as the first rank of 1F1B.
    """
    del num_chunks
    # The order is that of a full pipeline; what it has too many is left out, which keeps all that is left possible.
    total = max(2 * pp - 1, num_microbatches)
    actions: list[Action] = []
    made: Counter[tuple[Pass, int]] = Counter()

    def add(*passes: tuple[Pass, int]) -> None:
        for what in passes:
            actions.append(Action(what[0], made[what], what[1]))
            made[what] += 1

    # Until the first microbatch has come down the one arm of the V and up the other.
    for _ in range(2 * (pp - rank) - 1):
        add((_F, 0))
    for _ in range(rank):
        add((_F, 1), (_F, 0))
    for _ in range(pp - rank):
        add((_F, 1), (_I, 1), (_W, 1))
    # A forward and a backward in each arm.
    while made[_F, 1] < total:
        if made[_F, 0] < total:
            add((_F, 0))
        add((_I, 0), (_W, 0), (_F, 1), (_I, 1), (_W, 1))
    # No forward is left to wait with: weights wait instead.
    for _ in range(rank):
        add((_I, 0), (_I, 1))
    for _ in range(pp - rank):
        add((_I, 0), (_W, 0))
    for chunk in (1, 0):
        while made[_W, chunk] < total:
            add((_W, chunk))
    return tuple(action for action in actions if action.microbatch < num_microbatches)
