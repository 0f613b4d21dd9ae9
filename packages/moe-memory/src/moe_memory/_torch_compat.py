"""What this package uses of torch beyond its public interface, in one place."""

from torch import Tensor


def write_count(tensor: Tensor) -> int:
    """How often the memory of the tensor was written through it or its views.

    `tensor.data` is the same memory with a count of its own.
    """
    return tensor._version
