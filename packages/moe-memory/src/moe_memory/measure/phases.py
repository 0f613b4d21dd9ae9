"""`PeakMemory`: peak memory of this process by phase, as the device or the system counts it."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak memory of this process by phase, at a fifth of a millisecond a phase.

    On CUDA the peak of torch's allocator on the device. On a CPU the peak resident set of the process, everything
    included; where the system allows, its high-water mark is reset at the start of a phase, else a phase reports the
    peak since the start of the process.

    A phase inside another one is part of it. It is called by both names, as `step/forward`, and has its largest peak
    since the outer one began; an outermost phase that occurs again forgets its last time.

    Attributes:
        peaks_bytes: by name of the phase, in the order in which phases first ended.
        alone_bytes: the same, of the time in which no phase inside was open.
        source: which of these it is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[str] = []
        self.peaks_bytes: dict[str, int] = {}
        self.alone_bytes: dict[str, int] = {}
        if device.type == "cuda":
            self.source = "torch.cuda.max_memory_allocated"
        elif _reset_high_water_mark() and _high_water_mark_bytes() is not None:
            self.source = "VmHWM of the phase"
        else:
            self.source = "peak resident set since the start of the process"

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase."""
        if self._open:
            self._note()
        else:
            for old in [old for old in self.peaks_bytes if old == name or old.startswith(f"{name}/")]:
                del self.peaks_bytes[old], self.alone_bytes[old]
        self._open.append(name)
        self._restart()
        try:
            yield
        finally:
            self._note()
            self._open.pop()
            if self._open:
                self._restart()

    def _note(self) -> None:
        """The peak since the last restart belongs to every phase that is open."""
        peak, innermost = self._peak(), "/".join(self._open)
        for depth in range(len(self._open), 0, -1):
            name = "/".join(self._open[:depth])
            self.peaks_bytes[name] = max(self.peaks_bytes.get(name, 0), peak)
        self.alone_bytes[innermost] = max(self.alone_bytes.get(innermost, 0), peak)

    def _restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            _reset_high_water_mark()

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
