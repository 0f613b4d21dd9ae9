"""What a call of a `GraphedCallable` does: run and be recorded, or replay graphs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels._torch_compat import copy_each
from moe_kernels.errors import MoeKernelsError
from moe_kernels.graphs.callable import Form
from moe_kernels.graphs.host_reads import host_reads_refused
from moe_kernels.graphs.programs import Buffers, Evaluation, Program


class Record:
    """The function itself, with a graph of autograd of its own.

    Args:
        begun, differentiated: called when the forward and the backward begin.
    """

    def __init__(self, form: Form, begun: Callable[[], None], differentiated: Callable[[], None]) -> None:
        self.form = form
        self._begun = begun
        self._differentiated = differentiated
        self._live: Evaluation | None = None

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with host_reads_refused(repr(self.form.owner.name)):
            self._live = self.form.evaluate(inputs)
        _check_leaves(self.form, self._live)
        self._begun()
        return tuple(output.detach() for output in self._live.outputs)

    def backward(self, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        if self._live is None:
            raise MoeKernelsError(f"{self.form.owner.name!r} is differentiated twice, which graphs do not repeat")
        self._differentiated()
        live, self._live = self._live, None
        with host_reads_refused(f"the backward of {self.form.owner.name!r}"):
            gradients = live.gradients(grads)
        self.form.unread = tuple(gradient is None for gradient in gradients)
        return self.form.gradients(gradients)


@dataclass(frozen=True)
class Captured:
    """The graphs of one use, and the buffers on which they work."""

    form: Form
    buffers: Buffers
    program: Program


class Replay:
    """Graphs on static buffers.

    Args:
        differentiated: called before the backward is replayed; refuses another order.
        poison: fill what is dead after the backward.
    """

    def __init__(self, captured: Captured, differentiated: Callable[[], None], *, poison: bool) -> None:
        self.form = captured.form
        self._captured = captured
        self._differentiated = differentiated
        self._poison = poison

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        buffers = self._captured.buffers
        copy_each(buffers.inputs, inputs)
        self._captured.program.forward()
        return tuple(output.detach() for output in buffers.outputs)

    def backward(self, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        self._differentiated()
        buffers = self._captured.buffers
        copy_each(buffers.grads_in, grads)
        self._captured.program.backward()
        if self._poison:
            for buffer in (*buffers.inputs, *buffers.outputs):
                poison(buffer)
        # The buffers themselves: autograd copies a gradient that somebody else holds before it adds to it.
        return self.form.gradients(buffers.grads_out)


def poison(buffer: Tensor) -> None:
    """Overwrite with what shows: NaN, the largest integer, or True."""
    if buffer.is_floating_point():
        buffer.fill_(torch.nan)
    else:
        buffer.fill_(True if buffer.dtype == torch.bool else torch.iinfo(buffer.dtype).max)


def _check_leaves(form: Form, live: Evaluation) -> None:
    """Refuse a function that reads a parameter of no module that was named: it would get no gradient."""
    known = {id(tensor) for tensor in live.wanted}
    nodes, seen = [output.grad_fn for output in live.outputs if output.grad_fn is not None], set()
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf: Tensor | None = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise MoeKernelsError(
                f"{form.owner.name!r} reads a tensor of shape {tuple(leaf.shape)} that requires a gradient and is "
                f"neither an argument nor a parameter of its modules; pass it, or name its module (graphed)"
            )
        nodes += [following for following, _ in node.next_functions if following is not None]
