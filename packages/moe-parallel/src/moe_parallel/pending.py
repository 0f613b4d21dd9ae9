"""`Pending`: one handle for communication in flight, the same on gloo and on CUDA."""

from collections.abc import Callable, Sequence
from typing import Generic, NoReturn, Protocol, TypeVar

from moe_parallel.errors import MoeParallelError

T = TypeVar("T")


class Work(Protocol):
    """The part of `torch.distributed.Work` that is used here."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Pending(Generic[T]):
    """A value that may be read only after `wait()`.

    On gloo `wait()` blocks the host until the bytes have arrived. On CUDA it makes the current stream wait for the
    communication and returns at once, so the host is not synchronised. Waiting twice returns the same value and
    waits once; after a failure it fails again. `finish` runs once, after the communication, to turn the received
    buffers into the value.
    """

    def __init__(self, value: T, works: Sequence[Work] = (), finish: Callable[[T], T] | None = None) -> None:
        self._value = value
        self._works = tuple(works)
        self._finish = finish

    @classmethod
    def completed(cls, value: T) -> "Pending[T]":
        """Wrap a value that needed no communication."""
        return cls(value)

    def done(self) -> bool:
        """Whether `wait()` would return without waiting."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> T:
        """Wait for the communication and return the value."""
        for work in self._works:
            work.wait()
        self._works = ()
        if self._finish is not None:
            finish, self._finish = self._finish, _failed_before
            self._value = finish(self._value)
            self._finish = None
        return self._value


def _failed_before(_: object) -> NoReturn:
    raise MoeParallelError("this was waited for before, and failed; there is no value")
