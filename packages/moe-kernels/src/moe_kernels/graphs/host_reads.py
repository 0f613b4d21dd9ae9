"""Refusal of operations that read values on the host, which a captured graph cannot repeat.

CUDA refuses them too, while it captures, without a word on which operation it was.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from moe_kernels._torch_compat import observe_operators
from moe_kernels.errors import MoeKernelsError

# Operators that read a value, or whose result has a shape that depends on values.
_READS = (
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique",
    "aten::_unique2",
    "aten::unique_consecutive",
    "aten::unique_dim",
    "aten::bincount",
)
# Those whose index may be a mask, which becomes the places where it is true.
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
# What reads a CPU tensor without calling an operator.
_METHODS: tuple[Callable[..., Any], ...] = (Tensor.tolist, Tensor.numpy)


@contextmanager
def host_reads_refused(what: str) -> Iterator[None]:
    """Inside, an operation of this thread that reads values on the host is an error.

    Args:
        what: is captured; for the message.

    Raises:
        MoeKernelsError: names the operation, which has not run.
    """

    def observe(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if _reads(func.name().split(".")[0], args, kwargs):
            _refuse(what, str(func))

    with _Methods(what), observe_operators(observe):
        yield


class _Methods(TorchFunctionMode):
    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METHODS:
            _refuse(self._what, f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


def _reads(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name in _READS:
        return True
    if name == "aten::repeat_interleave":
        return kwargs.get("output_size") is None  # the host adds the repeats up
    if name not in _INDEXED or len(args) < 2:
        return False
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])


def _refuse(what: str, operation: str) -> None:
    raise MoeKernelsError(
        f"{what} cannot be captured: {operation} reads values on the host, which a replay does not repeat; compute it "
        f"before, or on the device with a shape that does not depend on values"
    )
