"""`PipelineChunk`: consecutive layers of a rank, and the passes that can be made through them."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

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


class SegmentedChunk(Generic[C]):
    """A chunk of segments; the graph is cut between them, so that each backward ends before the next begins.

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

    def backward(self, microbatch: int, report: Report) -> None:
        kept = self._kept.pop(microbatch)
        gradient: Tensor | None = None
        for segment in reversed(self._segments):
            x, y = kept.pop()
            torch.autograd.backward(y, gradient)
            gradient = x.grad
            del x, y
            report(segment.parameters)
