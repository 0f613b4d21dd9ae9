"""`Storages`: every storage that operators make, until it is freed; what `LiveBytes` and `MemoryAccount` share.

A storage is one object in Python, whichever of its tensors is asked for it. So it is known by a number while it lives,
and fake tensors, which have no memory, are counted as real ones.
"""

from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Self
from weakref import ref

import torch
from torch import Tensor

from moe_memory._torch_compat import observe_resizes, observe_results, plain_parts
from moe_memory.storage import observe_sizes


class Storages:
    """Sees storages come, change their size and go, at about ten microseconds an operator.

    A storage is known, whole, from the first operator inside the context that returns a tensor of it until it is freed,
    inside or later. Not seen are memory that a kernel takes for itself while it runs, what torch computes inside an
    operator of several tensors in one (DTensor), what has no storage (sparse tensors), other threads, and, outside the
    context, what is resized by others than `moe_memory.storage`.

    Storages are freed at any moment, also in the middle of this: by the collection of garbage, in any thread. So that
    is noted, and becomes a change before the next one. No peak lies between, since nothing grew.

    Args:
        device_type: only tensors on devices of this type count; None counts all but those on `meta`.
    """

    def __init__(self, device_type: str | None = None) -> None:
        self._device_type = device_type
        self._known: dict[int, ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        self._gone: deque[int] = deque()
        self._contexts = ExitStack()
        observe_sizes(self)

    def changed(self, number: int, before_bytes: int, now_bytes: int) -> None:
        """For subclasses: a storage has another size now, or will have it next."""

    def freed(self, number: int) -> None:
        """For subclasses: a storage is gone, after its size has changed to 0; its number may come again."""

    def __enter__(self) -> Self:
        self._contexts.enter_context(observe_resizes(self.resized))
        self._contexts.enter_context(observe_results(self.count))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._contexts.close()

    def count(self, result: object) -> None:
        """Know the storages of a tensor, or of those in a list, from now on."""
        if isinstance(result, Tensor):
            for part in plain_parts(result):
                if part.device.type == self._device_type or (self._device_type is None and not part.is_meta):
                    self._take(part.untyped_storage())
        elif isinstance(result, list | tuple):
            for part in result:
                self.count(part)

    def numbers(self, tensors: Iterable[Tensor]) -> list[int]:
        """Of the storages of these tensors, which the caller keeps, without those that are not known."""
        found = [id(part.untyped_storage()) for tensor in tensors for part in plain_parts(tensor)]
        # Behind that: until its change a number belongs to the storage that has gone.
        self.settle()
        return [number for number in found if number in self._known]

    def resized(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """See `StorageObserver`."""
        self.settle()
        number = id(storage)
        if number in self._known:
            before, self._sizes[number] = self._sizes[number], size_bytes
            self.changed(number, before, size_bytes)

    def settle(self) -> None:
        """Let every storage that has gone be a change."""
        while self._gone:
            number = self._gone.popleft()
            del self._known[number]
            self.changed(number, self._sizes.pop(number), 0)
            self.freed(number)

    def _take(self, storage: torch.UntypedStorage) -> None:
        self.settle()
        number, gone = id(storage), self._gone
        if number not in self._known:
            self._known[number] = ref(storage, lambda _: gone.append(number))
            self._sizes[number] = 0
            self.resized(storage, storage.nbytes())
        elif storage.nbytes() != self._sizes[number]:
            # An operator may resize what it is given.
            self.resized(storage, storage.nbytes())
