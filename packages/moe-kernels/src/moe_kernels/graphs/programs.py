"""What a graph is made of: forward and backward of a function on static buffers, captured by CUDA or run again.

`eager` runs the function at each replay, and everything around it (buffers, their reuse, the order) is that of `cuda`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from moe_kernels.errors import MoeKernelsError

T = TypeVar("T")

Backend = Literal["auto", "cuda", "eager"]

# Runs before a capture, in which libraries choose their kernels and set up their workspaces.
_WARM_UPS = 3

TensorFunction = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


def backend_for(backend: Backend, device: torch.device) -> Literal["cuda", "eager"]:
    """The backend that captures work on a device; `auto` takes CUDA graphs where the device has them.

    Raises:
        MoeKernelsError: it has not, and `cuda` was asked for.
    """
    if backend == "cuda" and device.type != "cuda":
        raise MoeKernelsError(f"CUDA graphs capture work on CUDA tensors, not on {device}; choose the backend eager")
    if backend == "auto":
        return "cuda" if device.type == "cuda" else "eager"
    return backend


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """Static memory of one use.

    Attributes:
        inputs, outputs: of the function.
        grads_in: gradients of the outputs that have one.
        grads_out: gradients of the inputs that require one, then of the parameters.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    grads_in: tuple[Tensor, ...]
    grads_out: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """One forward of a function, with the graph for its backward.

    Attributes:
        outputs: of the function.
        wanted: what gets a gradient: inputs that require one, then parameters.
    """

    outputs: tuple[Tensor, ...]
    wanted: tuple[Tensor, ...]

    def gradients(self, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Of what is wanted, from those of the outputs that have one; None where an output does not depend on it."""
        outputs = [output for output in self.outputs if output.requires_grad]
        return torch.autograd.grad(outputs, self.wanted, grads, allow_unused=True)


def evaluate(
    function: TensorFunction, inputs: Sequence[Tensor], requires_grad: Sequence[bool], parameters: Sequence[Tensor]
) -> Evaluation:
    """Run a function with a graph of its own, which ends at its inputs."""
    leaves = [x.detach().requires_grad_(flag) for x, flag in zip(inputs, requires_grad, strict=True)]
    with torch.enable_grad():
        outputs = function(leaves)
    wanted = (*(leaf for leaf in leaves if leaf.requires_grad), *parameters)
    return Evaluation(outputs=outputs, wanted=wanted)


class Program(Protocol):
    """Forward and backward of one use. Captured once, in the order of uses; replayed on what lies in the buffers."""

    def capture_forward(self) -> None: ...

    def capture_backward(self) -> None: ...

    def forward(self) -> None: ...

    def backward(self) -> None: ...


class EagerProgram:
    """Runs the function at each replay; captures nothing.

    Args:
        run: evaluates the function on the inputs in the buffers.
    """

    def __init__(self, run: Callable[[], Evaluation], buffers: Buffers) -> None:
        self._run = run
        self._buffers = buffers
        self._live: Evaluation | None = None

    def capture_forward(self) -> None:
        pass

    def capture_backward(self) -> None:
        pass

    def forward(self) -> None:
        self._live = _forward(self._run, self._buffers)

    def backward(self) -> None:
        assert self._live is not None
        live, self._live = self._live, None
        _backward(live, self._buffers)


class CudaStreamPool:
    """The memory that the graphs of a pool share, and the stream on which they are captured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handle = torch.cuda.graph_pool_handle()

    def capture(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """A graph of what the function launches."""
        graph = torch.cuda.CUDAGraph()
        # Threads that load data may allocate meanwhile.
        with torch.cuda.graph(graph, pool=self._handle, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph

    def warm_up(self, function: Callable[[], T]) -> T:
        """Run a function that is to be captured; the random state stays as it was."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.random.fork_rng(devices=[self._device]), torch.cuda.stream(self._stream):
            for _ in range(_WARM_UPS):
                result = function()
        current.wait_stream(self._stream)
        return result


class CudaProgram:
    """Two CUDA graphs.

    Both end with copies into the buffers, so that all that is allocated in them goes back to the pool: what the forward
    keeps for the backward when that is captured, the rest at once. A later graph may have it.

    Args:
        run: evaluates the function on the inputs in the buffers.
    """

    def __init__(self, run: Callable[[], Evaluation], buffers: Buffers, pool: CudaStreamPool) -> None:
        self._run = run
        self._buffers = buffers
        self._pool = pool
        self._live: Evaluation | None = None
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def capture_forward(self) -> None:
        self._pool.warm_up(lambda: _backward(_forward(self._run, self._buffers), self._buffers))
        self._graphs.append(self._pool.capture(self._capture_forward))

    def _capture_forward(self) -> None:
        self._live = _forward(self._run, self._buffers)

    def capture_backward(self) -> None:
        self._graphs.append(self._pool.capture(self._capture_backward))
        self._live = None

    def _capture_backward(self) -> None:
        assert self._live is not None
        _backward(self._live, self._buffers)

    def forward(self) -> None:
        self._replay(0, self._buffers.outputs)

    def backward(self) -> None:
        self._replay(1, self._buffers.grads_out)

    def _replay(self, number: int, written: tuple[Tensor, ...]) -> None:
        self._graphs[number].replay()
        # As a copy does: autograd then refuses a backward that kept one of these and would read other values.
        torch.autograd.graph.increment_version(written)


def _forward(run: Callable[[], Evaluation], buffers: Buffers) -> Evaluation:
    live = run()
    _copy(buffers.outputs, [output.detach() for output in live.outputs])
    return live


def _backward(live: Evaluation, buffers: Buffers) -> None:
    _copy(buffers.grads_out, live.gradients(buffers.grads_in))


def _copy(buffers: Sequence[Tensor], values: Sequence[Tensor | None]) -> None:
    with torch.no_grad():
        for buffer, value in zip(buffers, values, strict=True):
            if value is not None:
                buffer.copy_(value)
