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
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from moe_memory._torch_compat import withhold
from moe_memory.config import MemoryConfig
from moe_memory.copies import CopyEngine, copies_of
from moe_memory.errors import MoeMemoryError
from moe_memory.recompute import ActivationPolicy, Replay, activation_policy
from moe_memory.unit_choice import OFFLOAD_UNITS, check_entries, is_named, is_spread
from moe_parallel import Pending

T = TypeVar("T")


class HostPool:
    """Host memory by size, used again by later microbatches and steps.

    Sizes are rounded up, by an eighth at the most: rows of experts are never as many twice, and of each number there
    would be some memory for good. Pinned memory torch rounds up further, to a power of two, unless
    `pinned_max_round_threshold_mb` of PYTORCH_ALLOC_CONF says otherwise.

    Attributes:
        allocated_bytes: of all memory that it ever made, before torch rounds.
    """

    def __init__(self, copies: CopyEngine) -> None:
        self._copies = copies
        self._free: dict[int, list[Tensor]] = {}
        self.allocated_bytes = 0

    def take(self, size_bytes: int) -> Tensor:
        """Memory of this size at least, uint8."""
        step = 2 ** max(size_bytes.bit_length() - 4, 0)
        rounded = -(-size_bytes // step) * step
        free = self._free.get(rounded)
        if free:
            return free.pop()
        self.allocated_bytes += rounded
        return self._copies.host_empty(torch.empty(rounded, dtype=torch.uint8, device="meta"))

    def give(self, memory: Tensor) -> None:
        """Take back what nobody copies from or to any more."""
        self._free.setdefault(memory.numel(), []).append(memory)


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
        if is_named(self.rules.entries, unit):
            forward.add(unit.rpartition(".")[2], tensors, before)


def memory_policy(config: MemoryConfig, device: torch.device) -> ActivationPolicy:
    """What the configuration says of activations.

    Raises:
        MoeMemoryError: it names what is no unit.
    """
    check_entries("memory.offload", config.offload, OFFLOAD_UNITS)
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
        # Those that leave with the layer that is running: until it ends tensors may still be saved for a backward.
        self._ending: list[_Group] = []
        # By storage: who brings it back.
        self._units: WeakKeyDictionary[torch.UntypedStorage, tuple[str, int]] = WeakKeyDictionary()

    def __enter__(self) -> "_Forward":
        self._tokens.append(self._current.set(self))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._current.reset(self._tokens.pop())
        ending, self._ending = self._ending, []
        if error is None:
            for group in ending:
                group.leave()

    def add(self, unit: str, tensors: Sequence[Tensor], before: Tensor) -> None:
        """Tensors of the next layer, of which some earlier one is offloaded now."""
        keep, groups = self._policy.rules.keep, self._groups.setdefault(unit, [])
        number = len(groups)
        group = _Group(self._policy, self._chosen(unit, number, tensors), groups[-1] if groups else None)
        groups.append(group)
        before.register_hook(group.needed)  # type: ignore[no-untyped-call]
        if keep == 0:
            self._ending.append(group)
        elif number >= keep:
            groups[number - keep].leave()
        if number > keep:
            groups[number - keep - 1].left()

    def _chosen(self, unit: str, number: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        rules = self._policy.rules
        if not is_spread(number, rules.fraction):
            return []
        # What has no memory is recomputed.
        large = [
            tensor.detach()
            for tensor in tensors
            if tensor.numel() >= rules.min_elements and tensor.untyped_storage().nbytes()
        ]
        for tensor in large:
            other = self._units.setdefault(tensor.untyped_storage(), (unit, number))
            if other != (unit, number):
                raise MoeMemoryError(
                    f"an input of {unit} waits for the backward of {other[0]} already; offload one of the two"
                )
        return large


@dataclass
class _Group:
    """What one module of one layer reads.

    Attributes:
        tensors: that leave, without their graphs.
        below: that of the layer whose backward follows.
        hosts: by their storages, as a whole, where their values are.
        leaving, coming: copies on their way.
        give_back: lets autograd read them again; None where they are here.
    """

    policy: Offload
    tensors: list[Tensor]
    below: "_Group | None"
    hosts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    leaving: list[Pending[Tensor]] = field(default_factory=list)
    coming: list[Pending[Tensor]] = field(default_factory=list)
    give_back: Callable[[], None] | None = None

    def leave(self) -> None:
        """Copy to the host, and free behind that."""
        copies = self.policy.copies
        here = [tensor for tensor in self.tensors if tensor.untyped_storage().nbytes()]
        self.tensors = []
        if here:
            self.give_back = withhold(here)
        for tensor in {tensor.untyped_storage(): tensor for tensor in here}.values():
            whole = _whole(tensor)
            host = self.policy.pool.take(whole.numel())
            self.hosts.append((whole, host))
            self.leaving.append(copies.to_host(whole, host[: whole.numel()]))
            copies.release(whole)
            self.policy.offloaded_bytes += whole.numel()

    def left(self) -> None:
        """Wait until the copies are made."""
        while self.leaving:
            self.leaving.pop().wait()

    def come(self) -> None:
        """Begin to copy back, if it left."""
        if self.coming:
            return
        self.left()
        for whole, host in self.hosts:
            self.policy.copies.restore(whole)
            self.coming.append(self.policy.copies.to_device(host[: whole.numel()], whole))

    def needed(self, _: Tensor) -> None:
        """The backward that reads them begins: have them here, and the next ones on their way."""
        self.come()
        self._finish()
        if self.give_back is not None:
            self.give_back()
            self.give_back = None
        self.tensors = []
        if self.below is not None:
            self.below.come()
            self.below = None

    def _finish(self) -> None:
        """Wait for what is on its way, and leave the host memory to others."""
        self.left()
        while self.coming:
            self.coming.pop().wait()
        while self.hosts:
            self.policy.pool.give(self.hosts.pop()[1])

    def __del__(self) -> None:
        # A graph that is dropped without a backward, as after an exception.
        self._finish()


def _whole(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's storage, outside of autograd."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
