"""How often the host reads a tensor, counted per thread: each such read waits for the device where there is one."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

# Whatever makes Python of a tensor's values, or a shape that depends on them. `__index__` is left out: the group of
# `run_threads` calls it on tensors of its own.
_METHODS = ("item", "tolist", "cpu", "numpy", "nonzero", "unique", "masked_select", "is_nonzero", "equal")
_CONVERSIONS = ("__bool__", "__int__", "__float__", "__array__")
_FUNCTIONS = ("nonzero", "unique", "masked_select", "is_nonzero", "equal", "allclose")

_this_thread = threading.local()
_lock = threading.Lock()
_open = 0
_originals: list[tuple[Any, str, Any]] = []


@contextmanager
def count_host_reads() -> Iterator[list[str]]:
    """Record the reads of this thread while the context is open: what was called, in order.

    torch's dispatch modes would see more (what C++ reads for itself), but keep flags that threads share.
    """
    before: list[str] | None = getattr(_this_thread, "reads", None)
    reads: list[str] = []
    _this_thread.reads = reads
    _watch(True)
    try:
        yield reads
    finally:
        _watch(False)
        _this_thread.reads = before


def _watch(opens: bool) -> None:
    """Methods of tensors record calls as long as any thread counts them."""
    global _open  # noqa: PLW0603
    with _lock:
        _open += 1 if opens else -1
        if opens and _open == 1:
            for owner, names in ((Tensor, (*_METHODS, *_CONVERSIONS)), (torch, _FUNCTIONS)):
                for name in names:
                    original = getattr(owner, name)
                    _originals.append((owner, name, original))
                    setattr(owner, name, _recording(name, original))
        elif not opens and _open == 0:
            for owner, name, original in _originals:
                setattr(owner, name, original)
            _originals.clear()


def _recording(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        reads: list[str] | None = getattr(_this_thread, "reads", None)
        if reads is not None:
            reads.append(name)
        return original(*args, **kwargs)

    return recorded
