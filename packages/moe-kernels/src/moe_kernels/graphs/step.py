"""`GraphedStep`: forward and backward of a whole step as one graph, where every shape is static.

Gradients are added to in place, at the addresses of the capture.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moe_kernels.errors import MoeKernelsError
from moe_kernels.graphs.host_reads import host_reads_refused
from moe_kernels.graphs.programs import Backend, CudaStreamPool, backend_for
from moe_kernels.graphs.structure import Flat, TensorForm, check_same_form, check_same_structure, flatten, rebuild


class GraphedStep:
    """A function that differentiates what it computes, captured at its first call.

    The first call runs it to warm up, and puts back what it wrote to `modules` and `state`. So the function may write
    gradients of the parameters, buffers, and `state`, each in place, and nothing else. The host reads nothing in it.

    Args:
        function: takes and returns tensors, alone or in tuples, lists, dictionaries and dataclasses; what it returns
            is detached, and lies in buffers that the next call overwrites.
        modules: which it differentiates. A parameter without a gradient gets one of zeros.
        state: further tensors that it writes, such as those of an optimizer.
        backend: `cuda`, `eager`, which runs the function on the same buffers, or `auto`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *modules: nn.Module,
        state: Iterable[Tensor] = (),
        backend: Backend = "auto",
    ) -> None:
        self._function = function
        self._parameters = {
            f"module {number}.{name}": parameter
            for number, module in enumerate(modules)
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }
        self._written = (*(buffer for module in modules for buffer in module.buffers()), *state)
        self._backend = backend
        self._is_captured = False
        self._structure: Any = None
        self._forms: tuple[TensorForm, ...] = ()
        self._inputs: tuple[Tensor, ...] = ()
        self._output_structure: Any = None
        self._outputs: tuple[Tensor, ...] = ()
        self._gradients: dict[str, int | None] = {}
        self._replay: Callable[[], None] = self._run_into_outputs

    def __call__(self, *arguments: Any) -> Any:
        """As the function; gradients are added to those that parameters have.

        Raises:
            MoeKernelsError: the function reads values on the host, or an argument or a gradient is not as it was
                captured.
        """
        call = flatten({f"argument {number}": argument for number, argument in enumerate(arguments)})
        if not self._is_captured:
            self._capture(call)
        self._check(call)
        _copy(self._inputs, call.tensors)
        self._replay()
        torch.autograd.graph.increment_version(self._outputs)
        return rebuild(self._output_structure, [output.detach() for output in self._outputs])["output"]

    def _capture(self, call: Flat) -> None:
        self._structure = call.structure
        self._forms = tuple(map(TensorForm.of, call.tensors))
        self._inputs = tuple(form.allocate() for form in self._forms)
        _copy(self._inputs, call.tensors)
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        written = (*self._written, *(p.grad for p in self._parameters.values() if p.grad is not None))
        before = [tensor.detach().clone() for tensor in written]
        device = (*self._inputs, *written)[0].device
        pool = CudaStreamPool(device) if backend_for(self._backend, device) == "cuda" else None
        try:
            with host_reads_refused("the step"):
                outputs = pool.warm_up(self._run) if pool is not None else self._run_once()
        finally:
            _copy(written, before)
        self._outputs = tuple(TensorForm.of(output).allocate() for output in outputs)
        if pool is not None:
            self._replay = pool.capture(self._run_into_outputs).replay
        self._gradients = {name: _address(parameter) for name, parameter in self._parameters.items()}
        self._is_captured = True

    def _run(self) -> tuple[Tensor, ...]:
        leaves = [
            x.detach().requires_grad_(form.requires_grad) for x, form in zip(self._inputs, self._forms, strict=True)
        ]
        with torch.enable_grad():
            flat = flatten({"output": self._function(*rebuild(self._structure, leaves).values())})
        self._output_structure = flat.structure
        return tuple(tensor.detach() for tensor in flat.tensors)

    def _run_once(self) -> tuple[Tensor, ...]:
        with torch.random.fork_rng(devices=[]):
            return self._run()

    def _run_into_outputs(self) -> None:
        _copy(self._outputs, self._run())

    def _check(self, call: Flat) -> None:
        check_same_structure(call.structure, self._structure, "the step")
        for name, tensor, captured in zip(call.names, call.tensors, self._forms, strict=True):
            check_same_form(tensor, captured, "the step", name)
        for name, address in self._gradients.items():
            if _address(self._parameters[name]) != address:
                raise MoeKernelsError(
                    f"the gradient of {name} is not where it was when the step was captured; set it to "
                    f"zero in place (zero_grad(set_to_none=False))"
                )


def _address(parameter: nn.Parameter) -> int | None:
    return None if parameter.grad is None else parameter.grad.data_ptr()


def _copy(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)
