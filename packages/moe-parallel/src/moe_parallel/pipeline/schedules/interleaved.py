"""Schedules whose ranks hold several chunks of the model, which go round the ranks: less of a step is spent waiting."""

from collections.abc import Iterator
from itertools import pairwise

from moe_parallel.pipeline.schedule import Action, Pass
from moe_parallel.pipeline.schedules.one_chunk import one_f_one_b


def interleaved(pp: int, rank: int, num_microbatches: int, num_chunks: int) -> tuple[Action, ...]:
    """1F1B over several chunks (arXiv 2104.04473); with one chunk it is `one_f_one_b`.

    Microbatches go in rounds: all of a round through a chunk, then through the next. A round has `pp` microbatches
    where that divides their number and up to twice as many elsewhere, never fewer, for it would wait for its own first
    microbatch to come round.
    """
    if num_chunks == 1:
        return one_f_one_b(pp, rank, num_microbatches, num_chunks)
    forwards = list(_in_rounds(Pass.FORWARD, pp, num_microbatches, num_chunks))
    backwards = _in_rounds(Pass.BACKWARD, pp, num_microbatches, num_chunks)
    ahead = _ahead(pp, num_microbatches, num_chunks) + 2 * (pp - 1 - rank)
    actions = forwards[:ahead]
    for number, backward in enumerate(backwards, start=ahead):
        actions += [*forwards[number : number + 1], backward]
    return tuple(actions)


def interleaved_zero_bubble(pp: int, rank: int, num_microbatches: int, num_chunks: int) -> tuple[Action, ...]:
    """Like `interleaved`, but rank r makes the gradients of weights r passes later, where it would wait for messages.

    With one chunk it is ZB-H1 of arXiv 2401.10241, which holds no more than the first rank of 1F1B does.
    """
    forwards = list(_in_rounds(Pass.FORWARD, pp, num_microbatches, num_chunks))
    inputs = list(_in_rounds(Pass.INPUT, pp, num_microbatches, num_chunks))
    weights = list(_in_rounds(Pass.WEIGHT, pp, num_microbatches, num_chunks))
    ahead = _ahead(pp, num_microbatches, num_chunks) + pp - 1 - rank
    actions = forwards[:ahead]
    for number, backward in enumerate(inputs):
        actions += [*forwards[ahead + number : ahead + number + 1], backward]
        if number >= rank:
            actions.append(weights[number - rank])
    return tuple(actions + weights[max(0, len(inputs) - rank) :])


def zero_bubble(pp: int, rank: int, num_microbatches: int, num_chunks: int) -> tuple[Action, ...]:
    """ZB-H1 (arXiv 2401.10241): `interleaved_zero_bubble` of one chunk."""
    return interleaved_zero_bubble(pp, rank, num_microbatches, num_chunks)


def rounds(pp: int, num_microbatches: int) -> list[range]:
    """Microbatches of each round, as even as possible and the larger ones first."""
    count = max(1, num_microbatches // pp)
    size, larger = divmod(num_microbatches, count)
    starts = [number * size + min(number, larger) for number in range(count + 1)]
    return [range(first, behind) for first, behind in pairwise(starts)]


def _in_rounds(what: Pass, pp: int, num_microbatches: int, num_chunks: int) -> Iterator[Action]:
    """The passes of a rank; the order is the same on every rank, so that messages keep theirs."""
    chunks = range(num_chunks) if what is Pass.FORWARD else range(num_chunks - 1, -1, -1)
    for together in rounds(pp, num_microbatches):
        for chunk in chunks:
            for number in together:
                yield Action(what, number, chunk)


def _ahead(pp: int, num_microbatches: int, num_chunks: int) -> int:
    """Forwards that the last rank makes before it has a microbatch through all chunks."""
    return (num_chunks - 1) * len(rounds(pp, num_microbatches)[0])
