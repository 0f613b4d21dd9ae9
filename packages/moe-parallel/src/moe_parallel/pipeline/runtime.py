"""The runtime: executes the actions of a rank, passes on what they make, and says when gradients are complete."""

from collections.abc import Collection, Sequence
from functools import partial
from itertools import zip_longest
from typing import Protocol

import torch
from torch import Tensor

from moe_parallel.pipeline.chunk import PipelineChunk
from moe_parallel.pipeline.messages import Messages
from moe_parallel.pipeline.order import made, needed
from moe_parallel.pipeline.placement import Placement
from moe_parallel.pipeline.schedule import Action, Pass, check_schedule


class GradsReady(Protocol):
    """Told of gradients as they come; `last` if no further microbatch of the step adds to them."""

    def __call__(self, names: Collection[str], *, last: bool) -> None: ...


def run_actions(
    actions: Sequence[Action],
    chunks: Sequence[PipelineChunk],
    grads_ready: GradsReady,
    messages: Messages | None = None,
) -> None:
    """Execute the actions in order.

    Args:
        chunks: of this rank, in the order of the model.
        grads_ready: called layer by layer while a backward runs; `last` where the schedule
            has no further backward of that chunk, so that the reduction of these gradients may start.
        messages: between the stages; None where all of them are chunks of this rank.

    Raises:
        MoeParallelError: the list is no schedule; nothing was executed.
        CollectiveError: a neighbour died or did not come in time.
    """
    check_schedule(actions, len(chunks))
    messages = messages or Messages(Placement(pp=1, vpp=len(chunks)))
    last = {(action.chunk, action.what): action for action in actions}
    for action, following in zip_longest(actions, actions[1:]):
        _expect(action, chunks, messages)
        if following is not None:
            # What the next action needs travels meanwhile.
            _expect(following, chunks, messages)
        chunk, number = chunks[action.chunk], action.microbatch
        need, output = needed(action, messages.rank, messages.places), made(action, messages.rank, messages.places)
        value = None if need is None else messages.take(need)
        report = partial(grads_ready, last=last[action.chunk, action.what] == action)
        made_here: Tensor | None = None
        if action.what is Pass.FORWARD:
            made_here = chunk.forward(number, value)
        elif action.what is Pass.WEIGHT:
            chunk.backward_weight(number, report)
        elif action.what is Pass.INPUT:
            made_here = chunk.backward_input(number, value, report)
        else:
            made_here = chunk.backward(number, value, report)
        if output is not None:
            assert made_here is not None, "a stage that others wait for gives something"
            messages.give(output, made_here)
    messages.close()


def run_forward(chunks: Sequence[PipelineChunk], messages: Messages | None = None) -> Tensor | None:
    """The forward of microbatch 0 through all stages; returns the output of the last one, None on other ranks.

    Nothing is kept for a backward if gradients are switched off, as they should be.
    """
    messages = messages or Messages(Placement(pp=1, vpp=len(chunks)))
    places, found = messages.places, None
    for action in (Action(Pass.FORWARD, 0, chunk) for chunk in range(len(chunks))):
        _expect(action, chunks, messages)
        need, output = needed(action, messages.rank, places), made(action, messages.rank, places)
        value = chunks[action.chunk].forward(0, None if need is None else messages.take(need))
        if output is None:
            found = value
        else:
            messages.give(output, value)
    messages.close()
    return found


def _expect(action: Action, chunks: Sequence[PipelineChunk], messages: Messages) -> None:
    """Begin to receive what an action needs, if another rank makes it and its size is known by now."""
    need = needed(action, messages.rank, messages.places)
    if need is not None and messages.comes_from_afar(need):
        blank = chunks[action.chunk].blank(action.microbatch, need.gradient)
        if blank is not None:
            messages.expect(need, torch.empty_like(blank, memory_format=torch.contiguous_format))
