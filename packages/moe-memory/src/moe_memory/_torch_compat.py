"""What this package uses of torch beyond its public interface, in one place."""

from importlib import import_module

from torch import Tensor


def write_count(tensor: Tensor) -> int:
    """How often the memory of the tensor was written through it or its views.

    `tensor.data` is the same memory with a count of its own.
    """
    return tensor._version


def import_compiler() -> None:
    """Import torch's compiler, which the first hook of `fully_shard` would do: two seconds in the middle of a forward.

    Ranks that are forked later have it already.
    """
    import_module("torch._dynamo")
