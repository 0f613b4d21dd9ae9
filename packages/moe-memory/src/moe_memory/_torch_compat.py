"""What torch offers without promising it, in one place."""

from torch import Tensor


def write_count(tensor: Tensor) -> int:
    """How often the tensor was written to in place; views share the count, `Tensor.data` starts one of its own."""
    return tensor._version
