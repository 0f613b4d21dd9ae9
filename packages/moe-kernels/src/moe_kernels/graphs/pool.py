"""`GraphPool`: graphs of functions, captured in the order of a recorded step.

    pool = GraphPool()
    attend = pool.graphed("layers.0.attention", attention, attention)  # called in its place
    train_step()  # runs as it is, and is recorded
    pool.capture()
    train_step()  # replays

The graphs share one memory pool, in which each may write over what others left. They are therefore captured in the
order of the recorded step, and a replay in another order is refused.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_kernels.errors import MoeKernelsError
from moe_kernels.graphs.callable import Form, GraphedCallable, Run
from moe_kernels.graphs.order import Phase, Use, buffer_slots, graph_places
from moe_kernels.graphs.programs import (
    Backend,
    Buffers,
    CudaProgram,
    CudaStreamPool,
    EagerProgram,
    Program,
    backend_for,
)
from moe_kernels.graphs.runs import Captured, Record, Replay
from moe_kernels.graphs.structure import Flat, TensorForm


class GraphPool:
    """Graphs of functions that are called once per microbatch, and differentiated.

    The functions must be pure: what they return depends on their arguments, the modules and torch's random state, and
    they write nothing else.

    Args:
        backend: `cuda` captures CUDA graphs; `eager` runs the functions on the same buffers, on any device; `auto`
            takes `cuda` for CUDA tensors.
        read_before: lets gradients share more buffers (`buffer_slots`).
        poison: fill the buffers of inputs and outputs with NaN, or with the largest integer, when their backward has
            run: who reads them too late finds that, and not values of another microbatch.
    """

    def __init__(
        self, *, backend: Backend = "auto", read_before: Mapping[str, str] | None = None, poison: bool = False
    ) -> None:
        self._backend = backend
        self._read_before = dict(read_before or {})
        self._poison = poison
        self._callables: dict[str, GraphedCallable] = {}
        self.reset()

    def reset(self) -> None:
        """Forget graphs and buffers. The next step is recorded."""
        self._order: list[Use] = []
        self._calls: Counter[str] = Counter()
        self._captured: list[Captured] = []
        self._memory = _Memory()
        self._place = 0
        for graphed in self._callables.values():
            graphed.forms.clear()

    def graphed(self, name: str, function: Callable[..., Any], *modules: nn.Module) -> GraphedCallable:
        """What is called in place of the function.

        Args:
            name: unique in the pool.
            function: takes and returns tensors, alone or in tuples, lists, dictionaries and dataclasses; what else is
                in there is a constant of the graph.
            modules: whose parameters and buffers it reads.

        Raises:
            MoeKernelsError: the pool has another of this name.
        """
        if name in self._callables:
            raise MoeKernelsError(f"the pool has another callable of the name {name!r}")
        self._callables[name] = GraphedCallable(name, function, modules, self._begin)
        return self._callables[name]

    @property
    def order(self) -> tuple[Use, ...]:
        """What was recorded; after `capture` the part of it of which the rest is repetition."""
        return tuple(self._order)

    @property
    def num_graphs(self) -> int:
        """Graphs that were captured."""
        return len(set(graph_places(self._order))) if self._captured else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of static buffers, without what graphs keep between forward and backward."""
        return self._memory.num_bytes

    def capture(self) -> None:
        """Make graphs of the recorded step. Parameters and their gradients are left as they are.

        Raises:
            MoeKernelsError: there is no recorded step, or a forward of it had no backward.
        """
        if self._captured or not self._order:
            raise MoeKernelsError(
                "there is no recorded step to capture; run one first, after reset() if there are graphs"
            )
        graph_of = graph_places(self._order)
        period = max(graph_of) + 1
        if len(graph_of) % period == 0 and graph_of == [place % period for place in range(len(graph_of))]:
            # A step may then have any number of repetitions.
            del self._order[period:], graph_of[period:]
        forms = {form.name: form for graphed in self._callables.values() for form in graphed.forms}
        slots = buffer_slots(self._order, {name: form.shapes() for name, form in forms.items()}, self._read_before)
        slot_of = dict(zip(self._order, slots, strict=True))
        of_forward: dict[tuple[str, int], Captured] = {}
        captured: list[Captured] = []
        for place, use in enumerate(self._order):
            key, is_new = (use.name, use.microbatch), graph_of[place] == place
            if use.phase == "forward":
                if is_new:
                    buffers = self._memory.buffers(
                        forms[use.name], context=slot_of[use], gradient=slot_of[Use(*key, "backward")]
                    )
                    of_forward[key] = Captured(forms[use.name], buffers, self._program(forms[use.name], buffers))
                    of_forward[key].program.capture_forward()
                else:
                    of_forward[key] = captured[graph_of[place]]
            elif is_new:
                of_forward[key].program.capture_backward()
            captured.append(of_forward[key])
        for graphed in self._callables.values():
            graphed.remember_modules()
        for form in forms.values():
            form.samples = ()
        self._captured = captured

    def _program(self, form: Form, buffers: Buffers) -> Program:
        device = (*form.inputs, *form.outputs)[0].device
        run = partial(form.evaluate, buffers.inputs)
        if backend_for(self._backend, device) == "eager":
            return EagerProgram(run, buffers)
        return CudaProgram(run, buffers, self._memory.graphs_on(device))

    def _begin(self, graphed: GraphedCallable, call: Flat) -> Run:
        if self._captured:
            form = graphed.captured_form_of(call)
            use, captured = self._take(form.name, "forward")
            return Replay(captured, lambda: self._take_backward(use), poison=self._poison)
        found = graphed.form_of(call)
        if found is None:
            number = len(graphed.forms)
            found = Form(graphed.name + (f" ({number + 1})" if number else ""), graphed, call)
            graphed.forms.append(found)
        microbatch = self._calls[graphed.name]
        self._calls[graphed.name] += 1
        uses = (Use(found.name, microbatch, "forward"), Use(found.name, microbatch, "backward"))
        return Record(found, *(partial(self._order.append, use) for use in uses))

    def _take_backward(self, forward: Use) -> None:
        self._take(forward.name, "backward", forward.microbatch)

    def _take(self, name: str, phase: Phase, microbatch: int | None = None) -> tuple[Use, Captured]:
        use, captured = self._order[self._place], self._captured[self._place]
        if (use.name, use.phase) != (name, phase) or microbatch not in (None, use.microbatch):
            which = "" if microbatch is None else f" in microbatch {microbatch}"
            raise MoeKernelsError(
                f"{use} comes next in the recorded step, not the {phase} of {name!r}{which}; graphs are replayed in "
                f"the order of their capture, so keep to it or record another step (reset)"
            )
        self._place = (self._place + 1) % len(self._order)
        return use, captured


class _Memory:
    """Static buffers by slot, and the memory of graphs."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, tuple[Tensor, ...]] = {}
        self._graphs: CudaStreamPool | None = None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensors in self._buffers.values() for tensor in tensors)

    def buffers(self, form: Form, *, context: int, gradient: int) -> Buffers:
        shapes = form.shapes()

        def of(kind: str, slot: int, forms: Iterable[TensorForm]) -> tuple[Tensor, ...]:
            key = (kind, shapes, slot)
            if key not in self._buffers:
                self._buffers[key] = tuple(form.allocate() for form in forms)
            return self._buffers[key]

        buffers = Buffers(
            inputs=of("inputs", context, form.inputs),
            outputs=of("outputs", context, form.outputs),
            # Read while the backward runs, and never after.
            grads_in=of("gradients of outputs", 0, (output for output in form.outputs if output.requires_grad)),
            grads_out=of("gradients of inputs", gradient, form.wanted),
        )
        for buffer, sample in zip(buffers.inputs, form.samples, strict=True):
            buffer.copy_(sample)
        for buffer in buffers.grads_in:
            buffer.zero_()
        return buffers

    def graphs_on(self, device: torch.device) -> CudaStreamPool:
        self._graphs = self._graphs or CudaStreamPool(device)
        return self._graphs
