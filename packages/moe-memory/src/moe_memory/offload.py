"""Activation offload: inputs of chosen modules wait for their backward in host memory.

A model says when nobody reads a tensor any more but the backward behind a gradient (`ActivationPolicy.idle`). Then its
storage is copied to pinned host memory beside the computation, and freed; the storage is filled again one layer before
its backward begins, while the layer above it is differentiated. Autograd notices nothing: what it saved are views of
the same storage.

The latest layers of a forward stay, since their backward may follow at once: a layer is offloaded when `keep` others
have run behind it. So nothing has to be known about a stage in advance, and one activation of a module is on its way
while another is in use. Copies to the host that a whole layer has passed by are waited for, which bounds what is in
flight.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import floor
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe_memory.config import MemoryConfig
from moe_memory.copies import CopyEngine, copies_of
from moe_memory.recompute import ActivationPolicy, Replay, activation_policy
from moe_memory.unit_choice import units_at
from moe_parallel import Pending

T = TypeVar("T")
_Key = tuple[torch.Size, torch.dtype]


class HostPool:
    """Host memory by shape and dtype, used again by later microbatches and steps.

    Attributes:
        allocated_bytes: of all memory that it ever made.
    """

    def __init__(self, copies: CopyEngine) -> None:
        self._copies = copies
        self._free: dict[_Key, list[Tensor]] = {}
        self.allocated_bytes = 0

    def take(self, like: Tensor) -> Tensor:
        """Memory for the values of a tensor."""
        free = self._free.get((like.shape, like.dtype))
        if free:
            return free.pop()
        made = self._copies.host_empty(like)
        self.allocated_bytes += made.nbytes
        return made

    def give(self, tensor: Tensor) -> None:
        """Take back what nobody copies from or to any more."""
        self._free.setdefault((tensor.shape, tensor.dtype), []).append(tensor)


@dataclass(frozen=True, kw_only=True)
class OffloadRules:
    """What is offloaded.

    Attributes:
        entries: units, or `unit@pattern`.
        fraction: of the layers that an entry names, evenly spread.
        min_elements: smaller tensors stay.
        keep: so many of the latest layers of a forward stay.
    """

    entries: tuple[str, ...]
    fraction: float = 1.0
    min_elements: int = 2**20
    keep: int = 1


class Offload:
    """An `ActivationPolicy` that offloads what its rules name, and leaves the rest to another one.

    Args:
        inner: what else happens to activations.
        rules: what is offloaded.
        copies: makes the copies; of the device that computes.

    Attributes:
        pool: the host memory.
        offloaded_bytes: copied to the host so far.
    """

    def __init__(self, inner: ActivationPolicy, rules: OffloadRules, copies: CopyEngine) -> None:
        self._inner = inner
        self.rules, self.copies = rules, copies
        self.pool = HostPool(copies)
        self.offloaded_bytes = 0
        self._current: ContextVar[_Forward | None] = ContextVar("moe_memory_offload", default=None)

    def run(self, unit: str, function: Callable[..., T], replay: Replay, *args: Any) -> T:
        return self._inner.run(unit, function, replay, *args)

    def consumed(
        self, unit: str, outputs: Sequence[Tensor], before: Tensor, again: Callable[..., Any], *kept: Tensor
    ) -> None:
        self._inner.consumed(unit, outputs, before, again, *kept)

    def forward(self) -> AbstractContextManager[object]:
        return _Forward(self, self._current)

    def idle(self, unit: str, tensors: Sequence[Tensor], before: Tensor) -> None:
        forward = self._current.get()
        if forward is None or not (torch.is_grad_enabled() and before.requires_grad):
            return
        kind, number, part = unit.split(".", 2)
        if part in units_at(self.rules.entries, f"{kind}.{number}"):
            forward.add(part, tensors, before)


def memory_policy(config: MemoryConfig, device: torch.device) -> ActivationPolicy:
    """What the configuration says of activations."""
    inner = activation_policy(config.recompute)
    if not config.offload:
        return inner
    rules = OffloadRules(
        entries=config.offload,
        fraction=config.offload_fraction,
        min_elements=config.offload_min_elements,
        keep=config.offload_keep_layers,
    )
    return Offload(inner, rules, copies_of(device))


class _Forward:
    """One forward of a stage of the pipeline on one microbatch: what of it is offloaded, in the order of its layers.

    Entered around every layer, it makes itself the one that `Offload.idle` adds to.
    """

    def __init__(self, policy: Offload, current: "ContextVar[_Forward | None]") -> None:
        self._policy, self._current = policy, current
        self._tokens: list[Any] = []
        self._groups: dict[str, list[_Group]] = {}

    def __enter__(self) -> "_Forward":
        self._tokens.append(self._current.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._current.reset(self._tokens.pop())

    def add(self, unit: str, tensors: Sequence[Tensor], before: Tensor) -> None:
        """Tensors of the next layer, of which some earlier one is offloaded now."""
        rules, groups = self._policy.rules, self._groups.setdefault(unit, [])
        number = len(groups)
        # What has no memory is recomputed; a storage of several tensors is one.
        storages = {id(tensor.untyped_storage()): tensor for tensor in tensors}
        large = [
            _whole(tensor)
            for tensor in storages.values()
            if tensor.numel() >= rules.min_elements and tensor.untyped_storage().nbytes()
        ]
        # As many of the first n as the fraction says, for every n.
        is_chosen = floor((number + 1) * rules.fraction) > floor(number * rules.fraction)
        below = groups[-1] if groups else None
        group = _Group(self._policy, large if is_chosen else [], below)
        groups.append(group)
        before.register_hook(group.needed)  # type: ignore[no-untyped-call]
        if number >= rules.keep:
            groups[number - rules.keep].leave()
        if number > rules.keep:
            groups[number - rules.keep - 1].left()


@dataclass
class _Group:
    """What one module of one layer reads.

    Attributes:
        below: that of the layer whose backward follows.
    """

    policy: Offload
    tensors: list[Tensor]
    below: "_Group | None"
    hosts: list[Tensor] = field(default_factory=list)
    leaving: list[Pending[Tensor]] = field(default_factory=list)
    coming: list[Pending[Tensor]] | None = None

    def leave(self) -> None:
        """Copy to the host, and free behind that."""
        copies = self.policy.copies
        for tensor in self.tensors:
            host = self.policy.pool.take(tensor)
            self.hosts.append(host)
            self.leaving.append(copies.to_host(tensor, host))
            copies.release(tensor)
            self.policy.offloaded_bytes += tensor.nbytes

    def left(self) -> None:
        """Wait until the copies are made."""
        while self.leaving:
            self.leaving.pop().wait()

    def come(self) -> None:
        """Begin to copy back, if it left."""
        if self.coming is not None or not self.hosts:
            return
        self.left()
        self.coming = []
        for tensor, host in zip(self.tensors, self.hosts, strict=True):
            self.policy.copies.restore(tensor)
            self.coming.append(self.policy.copies.to_device(host, tensor))

    def needed(self, _: Tensor) -> None:
        """The backward that reads them begins: have them here, and the next ones on their way."""
        self.come()
        for pending in self.coming or ():
            pending.wait()
        for host in self.hosts:
            self.policy.pool.give(host)
        self.tensors, self.hosts, self.coming = [], [], None
        if self.below is not None:
            self.below.come()
            self.below = None


def _whole(tensor: Tensor) -> Tensor:
    """All elements of a tensor's storage, in a row and outside of autograd."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    flat.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))
    return flat
