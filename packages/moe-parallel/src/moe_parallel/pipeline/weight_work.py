"""`WeightWork`: gradients of weights that wait for a pass of their own, for which the stage before need not wait.

In a schedule that splits the backward (arXiv 2401.10241) the backward of a linear layer gives the gradient of its input
at once and leaves the product that is the gradient of its weight to later.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from moe_parallel._torch_compat import viewed


class WeightWork:
    """Products that are left to later, of one chunk.

    Linear layers whose forward runs inside `collecting` leave theirs here; other operations may with `later`.

    Args:
        parameters: of the model by global name. Only what is one of them, or a view of one, is left to later: the
            gradient of anything else has further to go in the same backward.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._left: dict[int, list[tuple[Tensor, Callable[[], Tensor]]]] = {}
        self._microbatch: int | None = None
        self._ever: set[str] = set()
        self._owed: dict[int, frozenset[str]] = {}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Linear layers that run inside can leave their weight work.

        Also open in the backward, where a forward may run again (recompute) and has to save what it saved before; what
        is differentiated there for its own sake leaves nothing.
        """
        with _Linears(self):
            yield

    @contextmanager
    def kept_for(self, microbatch: int) -> Iterator[None]:
        """A backward inside leaves its weight work for `do`."""
        self._microbatch = microbatch
        self._left[microbatch] = []
        try:
            yield
        finally:
            self._microbatch = None
            self._owed[microbatch] = frozenset(self._ever)

    @property
    def in_backward(self) -> bool:
        """Whether a backward is running that leaves its weight work."""
        return self._microbatch is not None

    def later(self, weight: Tensor, gradient: Callable[[], Tensor]) -> bool:
        """Called in a backward: whether the gradient of this weight is left to later, and need not be given now."""
        name = self._names.get(id(viewed(weight)))
        if self._microbatch is None or name is None:
            return False
        self._left[self._microbatch].append((weight, gradient))
        self._ever.add(name)
        return True

    def names(self, microbatch: int) -> frozenset[str]:
        """Global names of the parameters whose gradients are complete after `do` and not before: of all that ever left
        work, for where this microbatch left none an earlier one may still have some."""
        return self._owed[microbatch]

    def do(self, microbatch: int) -> None:
        """The gradients that a backward left, added to those of the parameters."""
        del self._owed[microbatch]
        left = self._left.pop(microbatch)
        while left:
            # Taken out, so that what a product is made from is freed with it.
            weight, gradient = left.pop(0)
            with torch.no_grad():
                product = gradient()
            # Where the weight is a view of a parameter, through the view.
            torch.autograd.backward(_give(weight, product))


class _Linears(TorchFunctionMode):
    """Sends linear layers through `_Linear`."""

    def __init__(self, work: WeightWork) -> None:
        super().__init__()
        self._work = work

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if function is F.linear and torch.is_grad_enabled():
            return self._linear(*arguments, **(keywords or {}))
        return function(*arguments, **(keywords or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # noqa: A002
        return _linear(input, weight, bias, self._work) if weight.requires_grad else F.linear(input, weight, bias)


class _Linear(torch.autograd.Function):
    """x W^T + b whose weight gradient may come later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, work: WeightWork) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.work = None if work.in_backward else work
        # The weight itself, not what is saved: its graph leads to the parameter.
        ctx.weight = weight
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad_RN = _rows(grad)

        def gradient() -> Tensor:
            return grad_RN.t() @ _rows(x)

        dx = grad @ weight if ctx.needs_input_grad[0] else None
        left = ctx.work is not None and ctx.work.later(ctx.weight, gradient)
        dw = None if left else gradient()
        return dx, dw, grad_RN.sum(0) if ctx.needs_input_grad[2] else None, None


_linear: Callable[..., Tensor] = _Linear.apply


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)


class _Give(torch.autograd.Function):
    """A scalar whose backward gives `gradient` to `weight`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, gradient: Tensor) -> Tensor:
        ctx.gradient = gradient
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.gradient, None


_give: Callable[..., Tensor] = _Give.apply
