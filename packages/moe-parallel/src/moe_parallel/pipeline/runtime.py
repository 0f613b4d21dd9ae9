"""The runtime: executes a list of actions and says when gradients are complete."""

from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

from moe_parallel.pipeline.chunk import PipelineChunk
from moe_parallel.pipeline.schedule import Action, Pass, check_schedule


class GradsReady(Protocol):
    """Told of gradients as they come; `last` if no further microbatch of the step adds to them."""

    def __call__(self, names: Collection[str], *, last: bool) -> None: ...


def run_actions(
    actions: Sequence[Action],
    chunks: Sequence[PipelineChunk],
    grads_ready: GradsReady,
) -> None:
    """Execute the actions in order.

    Args:
        grads_ready: called layer by layer while a backward runs; `last` where the schedule
            has no further backward of that chunk, so that the reduction of these gradients may start.

    Raises:
        MoeParallelError: the list is no schedule; nothing was executed.
    """
    check_schedule(actions, len(chunks))
    last = {action.chunk: action for action in actions if action.what is Pass.BACKWARD}
    for action in actions:
        chunk = chunks[action.chunk]
        if action.what is Pass.FORWARD:
            chunk.forward(action.microbatch)
        else:
            chunk.backward(action.microbatch, partial(grads_ready, last=last[action.chunk] == action))
