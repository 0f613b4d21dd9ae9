"""Kernels as torch operators: opaque to `torch.compile`, traceable under FakeTensorMode, and capturable in a graph.

Launchers do nothing but allocate and launch: no host synchronisation, and no grid that depends on values on the device.
Triton launches on the current CUDA device, so that an operator makes that of its first tensor current while it runs.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated launcher as `torch.ops.moe_kernels.<name>` and return that operator.

    Defined through the library and not with `custom_op`, which takes twice the host time of a call. It has no autograd
    formula: the differentiable function is the caller's.

    Args:
        schema: `name(Tensor x, ...) -> ...` as of `torch.library.define`.
        fake: from the same arguments to results of the right shape and dtype, without reading values.
    """
    name = f"moe_kernels::{schema.partition('(')[0]}"

    def register(launch: Callable[..., Any]) -> Callable[..., Any]:
        torch.library.define(name, schema[schema.index("(") :])
        torch.library.impl(name, "CompositeExplicitAutograd", on_device_of_tensors(launch))
        torch.library.register_fake(name, fake)
        found: Callable[..., Any] = getattr(torch.ops.moe_kernels, name.partition("::")[2]).default
        return found

    return register


def on_device_of_tensors(launch: Callable[..., Any]) -> Callable[..., Any]:
    """The launcher, on the CUDA device of its first tensor where that is not the current one."""

    @wraps(launch)
    def guarded(*arguments: Any) -> Any:
        for argument in arguments:
            if isinstance(argument, Tensor):
                if argument.is_cuda and argument.device.index != torch.cuda.current_device():
                    with torch.cuda.device(argument.device):
                        return launch(*arguments)
                break
        return launch(*arguments)

    return guarded
