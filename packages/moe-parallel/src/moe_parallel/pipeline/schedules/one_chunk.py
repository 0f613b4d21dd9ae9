"""GPipe and 1F1B, the schedules of pipelines whose ranks hold consecutive layers."""

from moe_parallel.pipeline.schedule import Action, Pass

_F, _B = Pass.FORWARD, Pass.BACKWARD


def gpipe(pp: int, rank: int, num_microbatches: int, num_chunks: int) -> tuple[Action, ...]:
    """All forwards, then all backwards (arXiv 1811.06965): every activation of the step is held at once."""
    del pp, rank
    return tuple(
        Action(what, number, chunk)
        for what, chunks in ((_F, range(num_chunks)), (_B, reversed(range(num_chunks))))
        for chunk in chunks
        for number in range(num_microbatches)
    )


def one_f_one_b(pp: int, rank: int, num_microbatches: int, num_chunks: int) -> tuple[Action, ...]:
    """1F1B (arXiv 2006.09503): a backward after every forward, as soon as it can be made.

    Rank r holds at most pp - r activations, however many microbatches there are.
    """
    del num_chunks
    ahead = min(pp - 1 - rank, num_microbatches)
    actions = [Action(_F, number) for number in range(ahead)]
    for number in range(num_microbatches):
        if ahead + number < num_microbatches:
            actions.append(Action(_F, ahead + number))
        actions.append(Action(_B, number))
    return tuple(actions)
