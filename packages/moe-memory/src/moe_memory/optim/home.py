"""`Home`: where tensors of optimizer state are between updates, on the device or in host memory."""

from collections import deque
from collections.abc import Sequence
from types import TracebackType

from torch import Tensor

from moe_memory.copies import CopyEngine
from moe_parallel import Pending

# Copies to the host of so many homes are under way at once. The device has the memory of a tensor until it has left;
# a host that did not wait would be far ahead, and bring everything back before anything has left.
_UNDER_WAY = 2

# What waits for the tensors of a home, of those that left last.
Departures = deque[list[Pending[Tensor]]]


class Home:
    """Tensors that are here inside the context, and in host memory outside of it.

    Entering waits for what `fetch` has begun; leaving begins the way back, under what comes next. Their memory on the
    device is free meanwhile.

    Args:
        tensors: contiguous, each the only one of its storage.
        copies: what moves them; None leaves them where they are.
        departures: of all homes that use these copies.
    """

    def __init__(self, tensors: Sequence[Tensor], copies: CopyEngine | None, departures: Departures) -> None:
        self._tensors = list(tensors) if copies is not None else []
        self._copies = copies
        self._host = [copies.host_empty(tensor) for tensor in self._tensors] if copies is not None else []
        self._departures = departures
        self._leaving: list[Pending[Tensor]] = []
        self._coming: list[Pending[Tensor]] = []
        self._away = False

    def leave(self) -> None:
        """Begin to copy to host memory; nobody touches the tensors until the next `fetch`."""
        assert not self._away, "state leaves once after every update"
        for tensor, host in zip(self._tensors, self._host, strict=True):
            assert self._copies is not None
            self._leaving.append(self._copies.to_host(tensor, host))
            self._copies.release(tensor)
        self._away = True
        if self._leaving:
            self._departures.append(self._leaving)
        while len(self._departures) > _UNDER_WAY:
            _wait_for(self._departures.popleft())

    def fetch(self) -> None:
        """Begin to copy back, if that is not under way."""
        if not self._away:
            return
        self._settle()
        for tensor, host in zip(self._tensors, self._host, strict=True):
            assert self._copies is not None
            self._copies.restore(tensor)
            self._coming.append(self._copies.to_device(host, tensor))
        self._away = False

    def current(self, tensor: Tensor) -> Tensor:
        """Live storage of one of the tensors, wherever it is now; what is under way has arrived."""
        if self._away:
            self._settle()
            for index, other in enumerate(self._tensors):
                if other is tensor:
                    return self._host[index]
        self._arrive()
        return tensor

    def __enter__(self) -> None:
        self.fetch()
        self._arrive()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _settle(self) -> None:
        _wait_for(self._leaving)

    def _arrive(self) -> None:
        _wait_for(self._coming)


def _wait_for(copies: list[Pending[Tensor]]) -> None:
    for pending in copies:
        pending.wait()
    copies.clear()
