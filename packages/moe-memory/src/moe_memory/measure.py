"""Measurement: bytes that autograd keeps for the backward pass, and peak memory by phase."""

import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from moe_memory.errors import MoeMemoryError

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class SavedBytes:
    """Counts what autograd saves while the context is open.

    Each storage counts once, whole, whatever views of it are saved; storages of `exclude` (the parameters, which live
    anyway) do not count. Saved-tensor hooks see neither what torch's selective checkpointing caches nor what a `Replay`
    remembers. What was saved stays alive until the context closes; opening it again starts from zero.
    """

    def __init__(self, exclude: Iterable[Tensor] = ()) -> None:
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in exclude}
        self._sizes: dict[int, int] = {}
        # Storages are held so that an address cannot be used again and counted as the same one.
        self._held: list[Tensor] = []
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def total_bytes(self) -> int:
        """Bytes of all storages saved so far."""
        return sum(self._sizes.values())

    @property
    def num_storages(self) -> int:
        """Number of storages saved so far."""
        return len(self._sizes)

    def __enter__(self) -> "SavedBytes":
        self._sizes.clear()
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)
        self._held.clear()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if address not in self._excluded and address not in self._sizes:
            self._sizes[address] = storage.nbytes()
            self._held.append(tensor.detach())
        # A node that kept its own output would be a reference cycle; a detached alias is none.
        return tensor.detach()


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
