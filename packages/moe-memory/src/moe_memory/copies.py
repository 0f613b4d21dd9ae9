"""`CopyEngine`: copies between device and host memory that run beside the computation.

`CudaCopies` has a stream for each direction and pinned host memory. `FakeCopies` stands in on machines without a
device: it copies when somebody waits and not before, spoils the target until then, and refuses what would be a race, so
that the order of calls is tested where there is nothing to race.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from moe_memory.errors import MoeMemoryError
from moe_memory.measure.account import within
from moe_memory.storage import resize
from moe_parallel import Pending

# Every byte of a target in flight: NaN in all float dtypes, -1 in whole numbers.
_SPOILED = 0xFF


class CopyEngine(Protocol):
    """Copies start in the order of the calls, after what the caller computed before, and end when they are waited for.

    Until then nobody writes the source or touches the target.
    """

    def host_empty(self, like: Tensor) -> Tensor:
        """Host memory for the values of a tensor."""

    def to_host(self, source: Tensor, out: Tensor | None = None) -> Pending[Tensor]:
        """Copy to host memory, `out` or new; after `wait()` the host may read it."""

    def to_device(self, source: Tensor, out: Tensor) -> Pending[Tensor]:
        """Copy from host memory; after `wait()` what the caller computes next may read it."""

    def release(self, tensor: Tensor) -> None:
        """Free the memory of a tensor once the copies of it that have been issued are made; it keeps its shape."""

    def restore(self, tensor: Tensor) -> None:
        """Give a released tensor memory again, with any values."""


class CudaCopies:
    """Copies by CUDA streams, one for each direction.

    Args:
        device: whose current stream computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._in = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def host_empty(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def to_host(self, source: Tensor, out: Tensor | None = None) -> Pending[Tensor]:
        out = self.host_empty(source) if out is None else out
        event = self._copy(source, out, self._out)
        source.record_stream(self._out)
        return Pending(out, [_OnHost(event)])

    def to_device(self, source: Tensor, out: Tensor) -> Pending[Tensor]:
        event = self._copy(source, out, self._in)
        out.record_stream(self._in)
        return Pending(out, [_OnStream(event, self._device)])

    def release(self, tensor: Tensor) -> None:
        # The allocator waits for the streams that were recorded.
        resize(tensor.untyped_storage(), 0)

    def restore(self, tensor: Tensor) -> None:
        resize(tensor.untyped_storage(), tensor.numel() * tensor.element_size())

    def _copy(self, source: Tensor, out: Tensor, stream: torch.cuda.Stream) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            out.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(stream)
        return event


class _OnHost:
    """The host waits for an event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def is_completed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class _OnStream:
    """The current stream waits for an event, the host does not."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def is_completed(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class FakeCopies:
    """Copies in ordinary memory that are made when they are waited for.

    Attributes:
        in_flight: number of copies that nobody has waited for.
        most_in_flight: the largest that ever was.
    """

    def __init__(self) -> None:
        self._waiting: list[_Fake] = []
        self._releases: list[Tensor] = []
        self.most_in_flight = 0

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def host_empty(self, like: Tensor) -> Tensor:
        with within("host memory", "offloaded"):
            return torch.empty(like.shape, dtype=like.dtype)

    def to_host(self, source: Tensor, out: Tensor | None = None) -> Pending[Tensor]:
        return self._start(source, self.host_empty(source) if out is None else out)

    def to_device(self, source: Tensor, out: Tensor) -> Pending[Tensor]:
        return self._start(source, out)

    def release(self, tensor: Tensor) -> None:
        if any(_same(tensor, copy.source) for copy in self._waiting):
            self._releases.append(tensor)
        else:
            resize(tensor.untyped_storage(), 0)

    def restore(self, tensor: Tensor) -> None:
        if any(_same(tensor, other) for other in self._releases):
            raise MoeMemoryError("a tensor is restored that is still being copied away: wait for that copy first")
        resize(tensor.untyped_storage(), tensor.numel() * tensor.element_size())

    def _start(self, source: Tensor, out: Tensor) -> Pending[Tensor]:
        for copy in self._waiting:
            if _same(copy.out, source):
                raise MoeMemoryError("a copy reads what another has not written yet: wait for that one first")
            if _same(copy.out, out) or _same(copy.source, out):
                raise MoeMemoryError("a copy writes what another has not finished with: wait for that one first")
        with torch.no_grad():
            out.view(torch.uint8).fill_(_SPOILED) if out.ndim else out.fill_(torch.nan)
        copy = _Fake(source, out, self._done)
        self._waiting.append(copy)
        self.most_in_flight = max(self.most_in_flight, len(self._waiting))
        return Pending(out, [copy])

    def _done(self, copy: "_Fake") -> None:
        self._waiting.remove(copy)
        for tensor in [tensor for tensor in self._releases if _same(tensor, copy.source)]:
            if not any(_same(tensor, other.source) for other in self._waiting):
                self._releases = [other for other in self._releases if other is not tensor]
                resize(tensor.untyped_storage(), 0)


class _Fake:
    """A copy that is made by `wait`."""

    def __init__(self, source: Tensor, out: Tensor, done: "Callable[[_Fake], None]") -> None:
        self.source, self.out = source, out
        self._done = done

    @torch.no_grad()
    def wait(self) -> object:
        self.out.copy_(self.source)
        return self._done(self)

    def is_completed(self) -> bool:
        return False


def copies_of(device: torch.device) -> CopyEngine:
    """The engine for tensors of a device."""
    return CudaCopies(device) if device.type == "cuda" else FakeCopies()


def _same(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage() is other.untyped_storage()
