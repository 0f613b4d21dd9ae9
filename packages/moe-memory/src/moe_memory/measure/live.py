"""`LiveBytes`: how many bytes of tensors live, and how many lived at most."""

from collections.abc import Iterable

from torch import Tensor

from moe_memory.measure.storages import Storages


class LiveBytes(Storages):
    """Counts the bytes of tensors: what lives now and the most that lived at once. What is not seen says `Storages`.

    Args:
        also: tensors that live already and count from the start.

    Attributes:
        peak_bytes: the largest value of `live_bytes` since the start, or since `restart_peak`.
    """

    def __init__(self, also: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._live_bytes = self.peak_bytes = 0
        self.count(list(also))

    @property
    def live_bytes(self) -> int:
        """Of storages that live now."""
        self.settle()
        return self._live_bytes

    def restart_peak(self) -> None:
        """Look for the peak from here on."""
        self.peak_bytes = self.live_bytes

    def changed(self, number: int, before_bytes: int, now_bytes: int) -> None:
        self._live_bytes += now_bytes - before_bytes
        self.peak_bytes = max(self.peak_bytes, self._live_bytes)
