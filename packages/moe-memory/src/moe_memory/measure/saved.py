"""`SavedBytes`: what autograd keeps for the backward pass.

A storage is one object in Python, whichever of its tensors is asked for it. So it is told from others by identity and
not by address, and fake tensors, which have no memory, are measured as real ones.
"""

from collections.abc import Iterable
from types import TracebackType
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moe_memory.storage import ignore_sizes, observe_sizes


class SavedBytes:
    """Counts what autograd saves while the context is open.

    Each storage counts once, whole, whatever views of it are saved; storages of `exclude` (the parameters, which live
    anyway) do not count, nor does what `moe_memory.storage` frees. Saved-tensor hooks see neither what torch's
    selective checkpointing caches nor what a `Replay` remembers. Nothing lives longer than without it; opening it again
    starts from zero.

    Attributes:
        total_bytes: of all storages saved so far and not freed.
        num_storages: the number of all that were saved.
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        self._excluded = WeakSet(tensor.untyped_storage() for tensor in exclude)
        self._seen = WeakSet[torch.UntypedStorage]()
        self.total_bytes = self.num_storages = 0
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def __enter__(self) -> "SavedBytes":
        self._seen = WeakSet(self._excluded)
        self.total_bytes = self.num_storages = 0
        observe_sizes(self)
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        ignore_sizes(self)

    def resized(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """See `StorageObserver`. What is filled again is so in a backward, and no longer kept for one."""
        if storage in self._seen and storage not in self._excluded:
            self.total_bytes -= max(storage.nbytes() - size_bytes, 0)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage not in self._seen:
            self._seen.add(storage)
            self.total_bytes += storage.nbytes()
            self.num_storages += 1
        # A node that kept its own output would be a reference cycle; a detached alias is none.
        return tensor.detach()
