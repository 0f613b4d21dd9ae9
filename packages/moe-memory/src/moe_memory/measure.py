"""Measurement: bytes that autograd keeps for the backward pass, bytes of live tensors, and peak memory by phase.

A storage is one object in Python, whichever of its tensors is asked for it. So the first two tell storages apart by
identity and not by address, and measure fake tensors, which have no memory, as they measure real ones.
"""

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moe_memory._torch_compat import observe_results
from moe_memory.errors import MoeMemoryError
from moe_memory.storage import ignore_sizes, observe_sizes

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


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


class LiveBytes:
    """Counts the bytes of tensors: what lives now and the most that lived at once, at some microseconds an operator.

    A storage counts, whole, from the first operator inside the context that returns a tensor of it until it is freed,
    inside or later. Memory that a kernel takes for itself while it runs is not seen, nor is a storage that is resized
    by others than `moe_memory.storage`. What is done in other threads is not seen either; on a CPU autograd has none.

    Args:
        also: tensors that live already and count from the start.

    Attributes:
        live_bytes: of storages that live now.
        peak_bytes: the largest value of that since the start, or since `restart_peak`.
    """

    def __init__(self, also: Iterable[Tensor] = ()) -> None:
        self.live_bytes = self.peak_bytes = 0
        # A storage is known by its number while it lives; the reference says when it no longer does.
        self._known: dict[int, ref[torch.UntypedStorage]] = {}
        self._sizes: dict[int, int] = {}
        observe_sizes(self)
        self._mode = observe_results(self._count)
        self._count(list(also))

    def restart_peak(self) -> None:
        """Look for the peak from here on."""
        self.peak_bytes = self.live_bytes

    def __enter__(self) -> "LiveBytes":
        self._mode.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._mode.__exit__(kind, error, trace)

    def _count(self, result: object) -> None:
        if isinstance(result, Tensor):
            self._take(result.untyped_storage())
        elif isinstance(result, list | tuple):
            for part in result:
                self._count(part)

    def _take(self, storage: torch.UntypedStorage) -> None:
        number = id(storage)
        if number in self._known:
            return

        def freed(_: object) -> None:
            del self._known[number]
            self.live_bytes -= self._sizes.pop(number)

        self._known[number] = ref(storage, freed)
        self._sizes[number] = 0
        self.resized(storage, storage.nbytes())

    def resized(self, storage: torch.UntypedStorage, size_bytes: int) -> None:
        """See `StorageObserver`."""
        number = id(storage)
        if number in self._known:
            self.live_bytes += size_bytes - self._sizes[number]
            self._sizes[number] = size_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class PeakMemory:
    """Peak memory of this process by phase, at a fifth of a millisecond a phase; phases do not nest.

    On CUDA the peak of torch's allocator on the device. On a CPU the peak resident set of the process, everything
    included; where the system allows, its high-water mark is reset at the start of a phase, else a phase reports the
    peak since the start of the process.

    Attributes:
        peaks_bytes: by name of the phase, in the order in which phases first ended.
        source: which of these it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: str | None = None
        self.peaks_bytes: dict[str, int] = {}
        if device.type == "cuda":
            self.source = "torch.cuda.max_memory_allocated"
        elif _reset_high_water_mark() and _high_water_mark_bytes() is not None:
            self.source = "VmHWM of the phase"
        else:
            self.source = "peak resident set since the start of the process"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase; a phase that occurs again keeps its latest peak.

        Raises:
            MoeMemoryError: another phase is open: there is one mark, and the inner phase would reset the outer one's.
        """
        if self._open is not None:
            raise MoeMemoryError(f"the phase {name!r} cannot begin inside the phase {self._open!r}")
        self._open = name
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_high_water_mark()
        try:
            yield
        finally:
            self.peaks_bytes[name] = self._peak()
            self._open = None

    def _peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        mark = _high_water_mark_bytes()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 if mark is None else mark


def _high_water_mark_bytes() -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)


def _reset_high_water_mark() -> bool:
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True
