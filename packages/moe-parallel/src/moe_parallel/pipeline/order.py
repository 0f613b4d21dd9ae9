"""The order in which the ranks of a pipeline can work, and the messages between them.

A forward needs the output of the stage before, a backward the gradient from the stage behind. What crosses ranks is a
message; a rank that has sent one goes on at once, and waits for what it needs only when it needs it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moe_parallel.errors import MoeParallelError
from moe_parallel.pipeline.placement import Placement
from moe_parallel.pipeline.schedule import Action, Pass, check_schedule

Ranks = Sequence[Sequence[Action]]

# Sending rank, receiving rank, whether gradients or outputs are sent.
Channel = tuple[int, int, bool]


class Output(NamedTuple):
    """What a stage makes for a neighbour: its output for the stage behind, or the gradient for the stage before.

    Printed as `output 3 of stage 1`, `gradient 3 of stage 2`.
    """

    gradient: bool
    microbatch: int
    stage: int

    def __str__(self) -> str:
        return f"{'gradient' if self.gradient else 'output'} {self.microbatch} of stage {self.stage}"


def needed(action: Action, rank: int, places: Placement) -> Output | None:
    """What the action needs from another stage."""
    stage = places.stage_of(rank, action.chunk)
    if action.what is Pass.FORWARD:
        return Output(False, action.microbatch, stage - 1) if stage else None
    if action.what is Pass.WEIGHT or stage == places.num_stages - 1:
        return None
    return Output(True, action.microbatch, stage + 1)


def made(action: Action, rank: int, places: Placement) -> Output | None:
    """What the action makes for another stage."""
    stage = places.stage_of(rank, action.chunk)
    if action.what is Pass.FORWARD:
        return Output(False, action.microbatch, stage) if stage < places.num_stages - 1 else None
    return Output(True, action.microbatch, stage) if action.what is not Pass.WEIGHT and stage else None


def receiver(output: Output, places: Placement) -> int:
    """The rank that needs it; may be the one that makes it."""
    return places.rank_of(output.stage + (-1 if output.gradient else 1))


def walk(ranks: Ranks, places: Placement) -> Iterator[tuple[int, Action]]:
    """Rank and action, each after everything that it needs; the order on a rank is that of its list.

    Raises:
        MoeParallelError: ranks wait for each other for ever; the message says for what.
    """
    there: set[Output] = set()
    waits: dict[Output, int] = {}
    next_place = [0] * len(ranks)
    ready = list(range(len(ranks)))
    while ready:
        rank = ready.pop()
        actions = ranks[rank]
        for place in range(next_place[rank], len(actions)):
            action = actions[place]
            need = needed(action, rank, places)
            if need and need not in there:
                waits[need] = rank
                break
            next_place[rank] += 1
            yield rank, action
            output = made(action, rank, places)
            if output:
                there.add(output)
                waiting = waits.pop(output, None)
                if waiting is not None:
                    ready.append(waiting)
    if waits:
        who = [f"rank {rank} at {ranks[rank][next_place[rank]]} for {need}" for need, rank in waits.items()]
        raise MoeParallelError(f"the schedule never ends, because ranks wait: {', '.join(sorted(who))}")


def check_ranks(ranks: Ranks, places: Placement) -> None:
    """Refuse lists that do not fit together.

    Every list is a schedule (`check_schedule`) of the same microbatches; no rank waits for ever; and what goes from one
    rank to another, outputs and gradients apart, is needed in the order in which it is sent, so that ordered sends and
    receives without labels suffice.

    Raises:
        MoeParallelError: the message names ranks and actions.
    """
    if len(ranks) != places.pp:
        raise MoeParallelError(f"there are schedules of {len(ranks)} ranks, but the number of ranks is {places.pp}")
    for rank, actions in enumerate(ranks):
        try:
            check_schedule(actions, places.vpp)
        except MoeParallelError as error:
            raise MoeParallelError(f"rank {rank}: {error}") from error
        if len({action.microbatch for action in actions}) != len({action.microbatch for action in ranks[0]}):
            raise MoeParallelError(f"rank {rank} has other microbatches than rank 0")
    for _ in walk(ranks, places):
        pass
    sent, received = messages(ranks, places)
    for channel, outputs in sent.items():
        for first, second in zip(outputs, received[channel], strict=True):
            if first != second:
                raise MoeParallelError(
                    f"rank {channel[0]} sends {first} to rank {channel[1]}, which needs {second} before it; messages "
                    f"between two ranks keep their order"
                )


def messages(ranks: Ranks, places: Placement) -> tuple[dict[Channel, list[Output]], dict[Channel, list[Output]]]:
    """What is sent and what is received, each in its order."""
    sent: dict[Channel, list[Output]] = defaultdict(list)
    received: dict[Channel, list[Output]] = defaultdict(list)
    for rank, actions in enumerate(ranks):
        for action in actions:
            output, need = made(action, rank, places), needed(action, rank, places)
            if output and receiver(output, places) != rank:
                sent[rank, receiver(output, places), output.gradient].append(output)
            if need and places.rank_of(need.stage) != rank:
                received[places.rank_of(need.stage), rank, need.gradient].append(need)
    return dict(sent), dict(received)
