"""`PipelineChunk`: consecutive layers of a rank, and the passes that can be made through them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from moe_parallel.errors import MoeParallelError

C = TypeVar("C")

Report = Callable[[Collection[str]], None]


class PipelineChunk(Protocol):
    """What the runtime executes. Microbatches are numbered from 0 within a step."""

    def forward(self, microbatch: int) -> None:
        """Run the layers and keep what the backward needs."""

    def backward(self, microbatch: int, report: Report) -> None:
        """Run the backward of a forward that was made, last layer first, and forget it.

        `report` is called with the global names of parameters as soon as this pass will add nothing more to their
        gradients; over the whole pass with every parameter of the chunk once.
        """


@dataclass(frozen=True)
class Segment(Generic[C]):
    """A piece of a model that is differentiated on its own.

    Attributes:
        name: for messages.
        parameters: global names of the parameters whose gradient is complete when the backward of this segment is: a
            parameter that several segments use belongs to the first of them.
        run: (input, context of the microbatch) to output, both one tensor.
    """

    name: str
    parameters: tuple[str, ...]
    run: Callable[[Tensor, C], Tensor]


class _Seed(torch.autograd.Function):
    """A scalar whose backward gives `gradient` to `y`.

    `torch.autograd.backward(y, gradient)` does the same after importing torch's symbolic shapes: three seconds, once.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return y.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


_seed: Callable[[Tensor, Tensor], Tensor] = _Seed.apply


class SegmentedChunk(Generic[C]):
    """A chunk of segments; the graph is cut between them, so that each backward ends before the next begins.

    Gradients are those of one backward over all segments. What was kept for a segment is freed before the report of its
    parameters.

    Args:
        segments: in forward order; the last one returns the scalar to differentiate.
        begin: microbatch to (first input, context); called once per forward.
    """

    def __init__(self, segments: Sequence[Segment[C]], begin: Callable[[int], tuple[Tensor, C]]) -> None:
        self._segments = tuple(segments)
        self._begin = begin
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def forward(self, microbatch: int) -> None:
        x, context = self._begin(microbatch)
        kept = self._kept[microbatch] = []
        for segment in self._segments:
            x = x.detach().requires_grad_(x.is_floating_point())
            y = segment.run(x, context)
            kept.append((x, y))
            x = y
        if x.numel() != 1:
            raise MoeParallelError(
                f"the last segment, {self._segments[-1].name}, returns the scalar to differentiate, not a tensor of "
                f"shape {list(x.shape)}"
            )

    def backward(self, microbatch: int, report: Report) -> None:
        kept = self._kept.pop(microbatch)
        gradient: Tensor | None = torch.ones_like(kept[-1][1])
        for segment in reversed(self._segments):
            x, y = kept.pop()
            # A segment without trained parameters needs no backward, and behind a detached value there is none.
            if gradient is not None and y.requires_grad:
                torch.autograd.backward(_seed(y, gradient))
            gradient = x.grad
            del x, y
            report(segment.parameters)
