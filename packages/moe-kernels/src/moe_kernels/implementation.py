"""Which implementation computes an operation: PyTorch's own operators (`plain`) or a Triton kernel (`triton`).

Both are the same function of the same tensors; the plain one is the reference of the other's tests and runs anywhere.
The choice belongs to the process, as torch's deterministic mode does: layers do not know it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_kernels.errors import MoeKernelsError

Implementation = Literal["auto", "plain", "triton"]

# Kernels compute in float32 inside, so that a float64 run would not be one.
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Of this process.
_chosen: dict[str, Implementation] = {"now": "auto"}


def choose_implementation(name: Implementation, device_type: str | None = None) -> None:
    """Choose for the whole process. `auto` takes Triton for CUDA tensors of at most float32, where it is installed.

    Args:
        device_type: of the tensors to come; with it `triton` fails here instead of at the first operation.

    Raises:
        MoeKernelsError: there is no such implementation, or it cannot run on that device.
    """
    legal = get_args(Implementation)
    if name not in legal:
        raise MoeKernelsError(f"no implementation is called {name!r}; legal here: {', '.join(legal)}")
    if name == "triton" and device_type is not None:
        _require(device_type)
    _chosen["now"] = name


@contextmanager
def implementation(name: Implementation) -> Iterator[None]:
    """Choose inside the context; the backward of what runs in it is computed as the forward was."""
    before = _chosen["now"]
    choose_implementation(name)
    try:
        yield
    finally:
        choose_implementation(before)


def uses_triton(x: Tensor) -> bool:
    """Whether an operation on x, of floats or of ids, is computed by a Triton kernel.

    Raises:
        MoeKernelsError: `triton` is chosen by name, and cannot compute in this dtype or on this device.
    """
    if _chosen["now"] == "plain":
        return False
    if _chosen["now"] == "auto":
        return x.is_cuda and _computes_in(x.dtype) and triton_unavailable("cuda") is None
    if not _computes_in(x.dtype):
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in TRITON_DTYPES)
        raise MoeKernelsError(f"Triton kernels are for {names}, not {x.dtype}; choose the implementation auto or plain")
    _require(x.device.type)
    return True


def _computes_in(dtype: torch.dtype) -> bool:
    return dtype in TRITON_DTYPES or not dtype.is_floating_point


def triton_unavailable(device_type: str) -> str | None:
    """Why Triton kernels cannot run on a device; None if they can."""
    if device_type not in _reasons:
        _reasons[device_type] = _reason(device_type)
    return _reasons[device_type]


# By device type. A dictionary, as Dynamo warns of functions with a cache of their own (`functools.cache`).
_reasons: dict[str, str | None] = {}


def _reason(device_type: str) -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed (pip install 'moe-stack-kernels[triton]')"
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "on CPU tensors Triton runs in its interpreter alone, with TRITON_INTERPRET=1 in the environment"
    if device_type not in ("cpu", "cuda"):
        return f"kernels are for CUDA tensors, not for {device_type}"
    return None


def _require(device_type: str) -> None:
    if reason := triton_unavailable(device_type):
        raise MoeKernelsError(f"the implementation 'triton' cannot run here: {reason}")
