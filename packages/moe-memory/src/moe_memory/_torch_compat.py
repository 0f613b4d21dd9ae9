"""What this package uses of torch beyond its public interface, in one place."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


def write_count(tensor: Tensor) -> int:
    """How often the memory of the tensor was written through it or its views.

    `tensor.data` is the same memory with a count of its own.
    """
    return tensor._version


def withhold(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Let autograd refuse to read the tensors, as if they had been written, until the function returned is called.

    That is what stands between memory which is away and a backward that comes too early. It holds for views too, and
    must be undone in the reverse order.
    """
    # They share the count of writes, and have no graph to keep alive.
    aliases = tuple(tensor.detach() for tensor in tensors)
    preserved = _unsafe_preserve_version_counter(aliases)
    torch.autograd.graph.increment_version(aliases)
    return lambda: preserved.__exit__(None, None, None)


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


@contextmanager
def observe_resizes(observe: Callable[[torch.UntypedStorage, int], None]) -> Iterator[None]:
    """A context in which `observe` is told of storages that Python code resizes, before that happens.

    torch has no hook for it, and `fully_shard` frees and fills gathered weights in this way.
    """
    before = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size_bytes: int) -> Any:
        observe(storage, size_bytes)
        return before(storage, size_bytes)

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = before  # type: ignore[method-assign]


def plain_parts(tensor: Tensor) -> list[Tensor]:
    """Those with storage that a tensor consists of: inside a DTensor and others of its kind, else itself.

    None where it has no storage, as sparse ones.
    """
    if type(tensor) in (Tensor, torch.nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
        return [tensor] if torch._C._has_storage(tensor) else []
    names, _ = tensor.__tensor_flatten__()
    # Newer versions of torch name parts that are no tensors, such as the mesh of a DTensor.
    inner = (getattr(tensor, name) for name in names)
    return [part for found in inner if isinstance(found, Tensor) for part in plain_parts(found)]
