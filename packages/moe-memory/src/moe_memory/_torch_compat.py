"""What this package uses of torch beyond its public interface, in one place."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


def write_count(tensor: Tensor) -> int:
    """How often the memory of the tensor was written through it or its views.

    `tensor.data` is the same memory with a count of its own.
    """
    return tensor._version


def in_backward() -> bool:
    """Whether this thread runs a backward, as a forward does that is repeated inside one."""
    return torch._C._current_graph_task_id() != -1


def import_compiler() -> None:
    """Import torch's compiler, which the first hook of `fully_shard` would do: two seconds in the middle of a forward.

    Ranks that are forked later have it already.
    """
    import_module("torch._dynamo")


def observe_results(observe: Callable[[object], None]) -> AbstractContextManager[object]:
    """A context in which `observe` sees what every operator that this thread calls returns: tensors, lists of them."""
    base = import_module("torch.utils._python_dispatch").TorchDispatchMode

    def dispatch(
        mode: object, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        observe(result)
        return result

    # torch otherwise imports its compiler (2 s) to keep it out of `__torch_dispatch__`.
    members = {"__torch_dispatch__": dispatch, "_should_skip_dynamo": classmethod(lambda mode_type: False)}
    mode: AbstractContextManager[object] = type("ResultMode", (base,), members)()
    return mode
