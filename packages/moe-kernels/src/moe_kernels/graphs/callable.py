"""`GraphedCallable`: a function whose forward and backward are replays of graphs, and the node that stands for them."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moe_kernels.errors import MoeKernelsError
from moe_kernels.graphs.programs import Evaluation, evaluate
from moe_kernels.graphs.structure import Flat, TensorForm, check_same_form, check_same_structure, flatten, rebuild


class Form:
    """A callable as it is called with tensors of one form.

    Args:
        name: of its uses.
        call: what it was called with when it was recorded.

    Attributes:
        inputs, outputs: forms of the tensors that it takes and returns.
        output_structure: of what it returns.
        unread: for each gradient that its backward returns whether there is none, as no output depends on it.
        samples: copies of what it was called with, for warm-up; dropped after the capture.
    """

    def __init__(self, name: str, owner: "GraphedCallable", call: Flat) -> None:
        self.name = name
        self.owner = owner
        self.structure = call.structure
        self.inputs = tuple(map(TensorForm.of, call.tensors))
        self.samples = tuple(tensor.detach().clone() for tensor in call.tensors)
        self.output_structure: Any = None
        self.outputs: tuple[TensorForm, ...] = ()
        self.unread: tuple[bool, ...] = ()

    def evaluate(self, inputs: Sequence[Tensor]) -> Evaluation:
        """Run the function on tensors of this form."""
        requires_grad = [form.requires_grad for form in self.inputs]
        return evaluate(self._run, inputs, requires_grad, self.owner.parameters)

    def _run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        result = self.owner.function(*rebuild(self.structure, inputs).values())
        flat = flatten({"output": result})
        self.output_structure = flat.structure
        self.outputs = tuple(map(TensorForm.of, flat.tensors))
        return flat.tensors

    @property
    def wanted(self) -> tuple[TensorForm, ...]:
        """Forms of what gets a gradient: inputs that require one, then parameters."""
        return (*(form for form in self.inputs if form.requires_grad), *map(TensorForm.of, self.owner.parameters))

    def shapes(self) -> tuple[tuple[TensorForm, tuple[int, ...]], ...]:
        """Uses that have these in common may share buffers."""
        return tuple((form, form.stride) for form in (*self.inputs, *self.outputs, *self.wanted))

    def gradients(self, wanted: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Those that autograd expects of all inputs and parameters, from those of what is wanted."""
        found = iter(zip(wanted, self.unread, strict=True))
        takes = [*(form.requires_grad for form in self.inputs), *(True for _ in self.owner.parameters)]
        result: list[Tensor | None] = []
        for taken in takes:
            gradient, unread = next(found) if taken else (None, True)
            result.append(None if unread else gradient)
        return tuple(result)


class Run(Protocol):
    """One forward of a callable, and its backward."""

    form: Form

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]: ...

    def backward(self, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Gradients of inputs and parameters from those of the outputs that have one."""


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        outputs = run.forward(tensors[:number])
        pairs = list(zip(outputs, run.form.outputs, strict=True))
        ctx.mark_non_differentiable(*(output for output, form in pairs if not form.requires_grad))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        run: Run = ctx.run
        taken = [grad for grad, form in zip(grads, run.form.outputs, strict=True) if form.requires_grad]
        return None, None, *run.backward(taken)


class GraphedCallable:
    """A function whose forward and backward are graphs; made by `GraphPool.graphed`.

    Attributes:
        name: in the pool.
        function: what it computes; may be called in its place where there is no graph, as in evaluation.
        parameters: those of the modules that are trained.
        forms: what it was called with in the recorded step.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        modules: Sequence[nn.Module],
        begin: Callable[["GraphedCallable", Flat], Run],
    ) -> None:
        self.name = name
        self.function = function
        self.parameters = tuple(
            {parameter: None for module in modules for parameter in module.parameters() if parameter.requires_grad}
        )
        self.forms: list[Form] = []
        self._modules = tuple(modules)
        self._begin = begin
        self._names = list(inspect.signature(function).parameters)
        self._captured: list[tuple[str, Callable[[], object], object]] = []

    def __call__(self, *arguments: Any) -> Any:
        """As the function.

        What is returned keeps its values until the backward of this call has run, and gradients as `buffer_slots` says.

        Raises:
            MoeKernelsError: an argument or a module is not as it was captured, or the call comes in another order.
        """
        if not torch.is_grad_enabled():
            raise MoeKernelsError(
                f"{self.name!r} is captured with its backward, and gradients are off here; call its function instead"
            )
        flat = flatten(self._named(arguments))
        run = self._begin(self, flat)
        outputs = _node(run, len(flat.tensors), *flat.tensors, *self.parameters)
        return rebuild(run.form.output_structure, outputs)["output"]

    def form_of(self, call: Flat) -> Form | None:
        """The form of a call; None if there was none like it."""
        inputs = tuple(map(TensorForm.of, call.tensors))
        return next((form for form in self.forms if (form.inputs, form.structure) == (inputs, call.structure)), None)

    def captured_form_of(self, call: Flat) -> Form:
        """The form of a call.

        Raises:
            MoeKernelsError: there was none like it, or the modules have changed; names what differs.
        """
        self._check_modules()
        if not self.forms:
            raise MoeKernelsError(f"{self.name!r} was not called in the recorded step; record another (reset)")
        form = self.form_of(call)
        if form is not None:
            return form
        first = self.forms[0]
        check_same_structure(call.structure, first.structure, repr(self.name))
        for name, tensor, captured in zip(call.names, call.tensors, first.inputs, strict=True):
            check_same_form(tensor, captured, repr(self.name), name)
        raise AssertionError("calls of equal parts have one form")

    def remember_modules(self) -> None:
        """What they are like now is what they must be like in a replay."""
        self._captured = [
            (f"{what} of module {number}{name and '.' + name}", read, read())
            for number, root in enumerate(self._modules)
            for name, module in root.named_modules()
            for what, read in _state(module)
        ]

    def _check_modules(self) -> None:
        for name, read, value in self._captured:
            if read() != value:
                raise MoeKernelsError(
                    f"{self.name!r} was captured with another {name}, which its graphs repeat; record another step "
                    f"(reset)"
                )

    def _named(self, arguments: Sequence[Any]) -> dict[str, Any]:
        names = self._names
        if len(names) != len(arguments):
            names = [f"argument {number}" for number in range(len(arguments))]
        return dict(zip(names, arguments, strict=True))


def _state(module: nn.Module) -> Iterator[tuple[str, Callable[[], object]]]:
    """What graphs do not read anew, by name: how to read it."""
    yield "training mode", lambda: module.training
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    # By name, as whoever shards parameters puts others in their place.
    for name, _ in own:
        yield f"memory of {name}", partial(_memory_of, module, name)
        yield f"requires_grad of {name}", partial(_requires_grad, module, name)


def _memory_of(module: nn.Module, name: str) -> int:
    tensor: Tensor = getattr(module, name)
    return tensor.data_ptr()


def _requires_grad(module: nn.Module, name: str) -> bool:
    tensor: Tensor = getattr(module, name)
    return tensor.requires_grad


_node: Callable[..., tuple[Tensor, ...]] = _Node.apply
