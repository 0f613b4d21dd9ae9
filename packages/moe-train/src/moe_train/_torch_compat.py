"""What this package uses of torch beyond its public interface, in one place."""

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

# Of the package that knows torch's process groups.
from moe_parallel._torch_compat import fake_world as fake_world


def fake_tensors() -> AbstractContextManager[Any]:
    """A context in which tensors are made without memory: they have a shape, a dtype, a storage and no values.

    They stay so behind it, and what is computed from them and from real tensors is fake as well.
    """
    fake = import_module("torch._subclasses.fake_tensor")
    mode: AbstractContextManager[Any] = fake.FakeTensorMode(allow_non_fake_inputs=True)
    return mode
