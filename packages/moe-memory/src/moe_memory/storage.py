"""The memory of a tensor that is freed and given back while the tensor lives, and who is told of it.

A tensor, its views and what autograd saved of them share one storage, so that all of them lose and regain their values
at once. No version is counted up: to autograd nothing has changed.
"""

from typing import Protocol
from weakref import WeakSet

import torch


class StorageObserver(Protocol):
    """Is told of storages whose size changes."""

    def resized(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """Called before the storage, which still has its old size, gets this one."""


_observers: WeakSet[StorageObserver] = WeakSet()


def observe_sizes(observer: StorageObserver) -> None:
    """Tell this observer from now on, as long as it lives."""
    _observers.add(observer)


def ignore_sizes(observer: StorageObserver) -> None:
    """Tell this observer no longer."""
    _observers.discard(observer)


def resize(storage: torch.UntypedStorage, size_bytes: int) -> None:
    """Give a storage another size; what was in it is lost where that is 0."""
    for observer in list(_observers):
        observer.resized(storage, size_bytes)
    storage.resize_(size_bytes)
