"""`PipelineChunk`: consecutive layers of a rank, and the passes that can be made through them."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from moe_parallel.errors import MoeParallelError
from moe_parallel.pipeline.weight_work import WeightWork

C = TypeVar("C")

Report = Callable[[Collection[str]], None]
# The kind of a pass, `forward`, `backward` or `weights`, and the segment that it is in: to a context around that part.
Around = Callable[[str, str], AbstractContextManager[object]]


class PipelineChunk(Protocol):
    """What the runtime executes. Microbatches are numbered from 0 within a step."""

    def blank(self, microbatch: int, gradient: bool) -> Tensor | None:
        """A tensor of the shape, dtype and device of the input, or of the gradient of the output; its values mean
        nothing. None if that is not known before another pass."""

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        """Run the layers and keep what the backward needs; x is None where the model begins. Returns the output,
        detached, for the stage behind."""

    def backward(self, microbatch: int, gradient: Tensor | None, report: Report) -> Tensor | None:
        """Run the backward of a forward that was made, last layer first, and forget it.

        Args:
            gradient: of the output; None where the model ends, with the scalar to differentiate.
            report: called with the global names of parameters as soon as this pass will add nothing more to their
                gradients; over the whole pass with every parameter of the chunk once.

        Returns the gradient of the input, None where the model begins.
        """

    def backward_input(self, microbatch: int, gradient: Tensor | None, report: Report) -> Tensor | None:
        """The part of `backward` for which the stage before waits; reports the parameters that it completes."""

    def backward_weight(self, microbatch: int, report: Report) -> None:
        """The rest of `backward`, after `backward_input`; reports the other parameters."""


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
    parameters. A chunk without segments passes on what it gets.

    What fails in a pass says in a note where: in which pass, segment and microbatch.

    Args:
        segments: in forward order; of the last chunk of a model the last one returns the scalar to differentiate.
        begin: microbatch to (first input, context); called once per forward. Where the model does not begin here, the
            input is one to tell shape, dtype and device from.
        ends: the model ends here.
        weight_work: keeps the gradients of weights for the pass of their own, where passes are split.
        around: entered for every segment of a pass, for those who measure; `begin` is one, called `inputs`, and all of
            a pass `weights`.
    """

    def __init__(
        self,
        segments: Sequence[Segment[C]],
        begin: Callable[[int], tuple[Tensor, C]],
        *,
        ends: bool = True,
        weight_work: WeightWork | None = None,
        around: Around = lambda _, __: nullcontext(),
    ) -> None:
        self._segments = tuple(segments)
        self._begin = begin
        self._ends = ends
        self._weight_work = weight_work
        self._around = around
        self._begun: dict[int, tuple[Tensor, C]] = {}
        self._kept: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._outputs: dict[int, Tensor] = {}

    def blank(self, microbatch: int, gradient: bool) -> Tensor | None:
        if gradient:
            return self._outputs.get(microbatch)
        self._ensure_begun(microbatch)
        return self._begun[microbatch][0]

    def forward(self, microbatch: int, x: Tensor | None) -> Tensor:
        self._ensure_begun(microbatch)
        first, context = self._begun.pop(microbatch)
        y = first if x is None else x
        kept = self._kept[microbatch] = []
        with self._collecting():
            for segment in self._segments:
                x = y.detach().requires_grad_(y.is_floating_point() and torch.is_grad_enabled())
                with self._inside("forward", segment.name, microbatch):
                    y = segment.run(x, context)
                kept.append((x, y))
        if not torch.is_grad_enabled():
            del self._kept[microbatch]
        elif self._ends and y.numel() != 1:
            name = self._segments[-1].name if self._segments else "of which there is none"
            raise MoeParallelError(
                f"the last segment, {name}, returns the scalar to differentiate, not a tensor of shape {list(y.shape)}"
            )
        else:
            self._outputs[microbatch] = y.detach()
        return y.detach()

    def backward(self, microbatch: int, gradient: Tensor | None, report: Report) -> Tensor | None:
        return self._differentiate(microbatch, gradient, report)

    def backward_input(self, microbatch: int, gradient: Tensor | None, report: Report) -> Tensor | None:
        assert self._weight_work is not None, "the schedule splits the backward, so there is a place for weight work"
        with self._weight_work.kept_for(microbatch):
            dx = self._differentiate(microbatch, gradient, lambda _: None)
        left = self._weight_work.names(microbatch)
        self._report(report, lambda name: name not in left)
        return dx

    def backward_weight(self, microbatch: int, report: Report) -> None:
        assert self._weight_work is not None, "the schedule splits the backward, so there is a place for weight work"
        left = self._weight_work.names(microbatch)
        with self._inside("weights", "all layers", microbatch):
            self._weight_work.do(microbatch)
        self._report(report, lambda name: name in left)

    def _report(self, report: Report, chosen: Callable[[str], bool]) -> None:
        for segment in reversed(self._segments):
            names = [name for name in segment.parameters if chosen(name)]
            if names:
                report(names)

    def _differentiate(self, microbatch: int, gradient: Tensor | None, report: Report) -> Tensor | None:
        kept = self._kept.pop(microbatch)
        output = self._outputs.pop(microbatch)
        if gradient is None:
            gradient = torch.ones_like(output)
        for segment in reversed(self._segments):
            x, y = kept.pop()
            # A segment without trained parameters needs no backward, and behind a detached value there is none.
            if gradient is not None and y.requires_grad:
                # A segment that recomputes runs its forward in here. By its edge, since torch hands a backward of
                # tensors to the mode, which is not active in what it has been handed.
                root = get_gradient_edge(_seed(y, gradient))
                with self._collecting(), self._inside("backward", segment.name, microbatch):
                    torch.autograd.backward(root)
                del root
            gradient = x.grad
            del x, y
            report(segment.parameters)
        return gradient

    def _ensure_begun(self, microbatch: int) -> None:
        if microbatch not in self._begun:
            with self._inside("forward", "inputs", microbatch):
                self._begun[microbatch] = self._begin(microbatch)

    @contextmanager
    def _inside(self, kind: str, name: str, microbatch: int) -> Iterator[None]:
        try:
            with self._around(kind, name):
                yield
        except Exception as error:
            error.add_note(f"in the pass {kind!r} of {name}, microbatch {microbatch}")
            raise

    def _collecting(self) -> AbstractContextManager[None]:
        return nullcontext() if self._weight_work is None else self._weight_work.collecting()
