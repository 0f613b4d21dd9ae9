"""Names of torch that are private or differ between releases; nothing else in this package uses such names."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

Observer = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]


def observe_operators(observe: Observer) -> AbstractContextManager[object]:
    """A context in which `observe` sees every operator that this thread calls, and its arguments, before it runs."""
    base = import_module("torch.utils._python_dispatch").TorchDispatchMode

    def dispatch(
        mode: object, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        observe(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    # torch otherwise imports its compiler (2 s) to keep it out of `__torch_dispatch__`.
    members = {"__torch_dispatch__": dispatch, "_should_skip_dynamo": classmethod(lambda mode_type: False)}
    mode: AbstractContextManager[object] = type("OperatorMode", (base,), members)()
    return mode


def copy_each(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each tensor into its target; on a GPU in a few launches, however many there are."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def is_observed() -> bool:
    """Whether a mode sees every operator that this thread calls: fake tensors, tracers, counters of FLOPs."""
    return torch._C._len_torch_dispatch_stack() > 0
