"""`MemoryAccount`: what tensors a peak of memory consists of, by class and by owner.

Whoever makes tensors says what they are for (`within`), in less than a microsecond while no account is open.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import ClassVar, Literal, NamedTuple, Self, get_args
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from moe_memory.errors import MoeMemoryError
from moe_memory.measure.storages import Storages

MemoryClass = Literal["parameters", "gradients", "optimizer", "activations", "dispatch", "offloaded", "temporary"]
MEMORY_CLASSES: tuple[MemoryClass, ...] = get_args(MemoryClass)


class Owner(NamedTuple):
    """What a storage counts as.

    Attributes:
        kind: its class.
        name: the scope that made it, or the parameter that it belongs to.
    """

    kind: MemoryClass
    name: str


# What no scope made.
UNNAMED = Owner("temporary", "unnamed")


class IdleInput(NamedTuple):
    """Inputs of a unit that nobody reads before its backward (`ActivationPolicy.idle`).

    Attributes:
        unit: its name, as `layers.3.core_attn`.
        elements: of each of these tensors.
    """

    unit: str
    elements: int


@dataclass(frozen=True)
class Peak:
    """Tensors that lived at once.

    Attributes:
        total_bytes: of all of them.
        owners: the same, by owner.
        idle: those of them that waited for a backward; one that several units read is of the first.
    """

    total_bytes: int = 0
    owners: Mapping[Owner, int] = field(default_factory=dict)
    idle: Mapping[IdleInput, int] = field(default_factory=dict)

    def classes(self) -> dict[MemoryClass, int]:
        """The same, by class; every class is there."""
        found = dict.fromkeys(MEMORY_CLASSES, 0)
        for owner, size_bytes in self.owners.items():
            found[owner.kind] += size_bytes
        return found


@dataclass
class _Scope:
    owner: Owner
    made: list[int] = field(default_factory=list)


class MemoryAccount(Storages):
    """Sorts tensors by class and owner while it is open, and keeps the peak of each phase.

    A tensor belongs to the innermost `within` in which it was made. In one of `activations` it is temporary at first
    and an activation if it outlives the scope. Weights and gradients are known as such by their parameters, when a
    module with them is called and behind a `backward`. What nobody claims is temporary; so classes always add up to
    the total.

    At most one account is open. What is made while it is closed is not counted, also if it is opened again; what it
    knows it follows until that is freed.

    Args:
        device: tensors on devices of its type count.

    Attributes:
        peaks: by phase, in the order in which phases first began.
        failed_phase: that an error ended, the innermost; None if there was none.
        seconds: that the host spent inside scopes of activations, and in what is `timed`, in the phase `forward`, by
            name; inner ones included, and on CUDA until the current stream is through.
    """

    _open: ClassVar["MemoryAccount | None"] = None

    def __init__(self, device: torch.device) -> None:
        super().__init__(device.type)
        self._device = device
        self._module_names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        # By number: tensors are no keys, since they compare element by element.
        self._parameters: dict[int, ref[nn.Parameter]] = {}
        self._owners: dict[int, Owner] = {}
        self._idle_inputs: dict[int, IdleInput] = {}
        self._bytes: dict[Owner, int] = defaultdict(int)
        self._idle_bytes: dict[IdleInput, int] = defaultdict(int)
        self._live_bytes = 0
        self._scopes: list[_Scope] = []
        self._phase: str | None = None
        self.restart()

    def restart(self) -> None:
        """Forget peaks and times, but not what lives."""
        self.peaks: dict[str, Peak] = {}
        self.failed_phase: str | None = None
        self.seconds: dict[str, float] = defaultdict(float)

    def __enter__(self) -> Self:
        if MemoryAccount._open is not None:
            raise MoeMemoryError("an account of memory is open already; close it first")
        MemoryAccount._open = self
        super().__enter__()
        # Behind the forward as well, since a module may get its weights at the start of it (`fully_shard`).
        self._hooks = [
            register_module_forward_pre_hook(lambda module, _: self._know_module(module)),
            register_module_forward_hook(lambda module, *_: self._know_module(module)),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        MemoryAccount._open = None
        for hook in self._hooks:
            hook.remove()
        super().__exit__(kind, error, trace)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Until the end of this phase peaks are its own; that of a phase which occurs again is the largest."""
        self._end_phase()
        outer, self._phase = self._phase, name
        self.peaks.setdefault(name, Peak())
        try:
            yield
        except BaseException:
            self.failed_phase = self.failed_phase or name
            raise
        finally:
            self._end_phase()
            self._phase = outer

    @contextmanager
    def within(self, name: str, kind: MemoryClass = "activations") -> Iterator[None]:
        """What is made here is of this class and has this name; activations are what outlives it.

        Raises:
            MoeMemoryError: there is no such class.
        """
        if kind not in MEMORY_CLASSES:
            raise MoeMemoryError(f"{kind!r} is no class of memory; classes are {', '.join(MEMORY_CLASSES)}")
        scope = _Scope(Owner("temporary" if kind == "activations" else kind, name))
        self._scopes.append(scope)
        try:
            with self.timed(name) if kind == "activations" else nullcontext():
                yield
        finally:
            self._scopes.pop()
            self.settle()
            if kind == "activations":
                for number in scope.made:
                    if self._owners.get(number) == scope.owner:
                        self._move(number, Owner(kind, name))

    @contextmanager
    def backward(self, name: str) -> Iterator[None]:
        """What is made in this part of a backward is temporary, but for gradients of parameters."""
        with self.within(name, "temporary"):
            yield
        self._know_gradients()

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add to `seconds`, in a forward."""
        if self._phase != "forward":
            yield
            return
        start = self._time()
        yield
        self.seconds[name] += self._time() - start

    def know(self, model: nn.Module) -> None:
        """Name the modules of a model by their place in it, and know the weights and gradients that there are."""
        for name, module in model.named_modules():
            self._module_names[module] = name
            self._know_module(module)
        self._know_gradients()

    def claim(self, tensors: Iterable[Tensor], name: str) -> None:
        """These activations, made in any scope, have this name."""
        for number in self.numbers(tensors):
            if self._owners[number].kind in ("temporary", "activations"):
                self._move(number, Owner("activations", name))

    def adopt(self, tensors: Iterable[Tensor], name: str) -> None:
        """Those of these tensors that were made in no scope are activations, and have this name."""
        for number in self.numbers(tensors):
            if self._owners[number] == UNNAMED:
                self._move(number, Owner("activations", name))

    def hand_on(self, result: object, name: str | None = None) -> None:
        """Tensors in what a scope returned, alone or in a tuple, have this name, or belong to the scope around it."""
        tensors = [part for part in (result if isinstance(result, tuple) else (result,)) if isinstance(part, Tensor)]
        if name is not None:
            self.claim(tensors, name)
            return
        for number in self.numbers(tensors):
            if self._scopes and self._owners[number].kind == "activations":
                self._move(number, self._scopes[-1].owner)
                self._scopes[-1].made.append(number)

    def idle(self, tensors: Iterable[Tensor], unit: str) -> None:
        """These are inputs of a unit that are not read before its backward."""
        for tensor in tensors:
            found = IdleInput(unit, tensor.numel())
            for number in self.numbers([tensor]):
                if number not in self._idle_inputs:
                    self._idle_inputs[number] = found
                    self._idle_bytes[found] += self._sizes[number]

    def changed(self, number: int, before_bytes: int, now_bytes: int) -> None:
        if now_bytes < before_bytes:
            self._note_peak()
        if number not in self._owners:
            scope = self._scopes[-1] if self._scopes else _Scope(UNNAMED)
            self._owners[number] = scope.owner
            scope.made.append(number)
        self._add(self._owners[number], now_bytes - before_bytes)
        if number in self._idle_inputs:
            self._idle_bytes[self._idle_inputs[number]] += now_bytes - before_bytes
        self._live_bytes += now_bytes - before_bytes

    def freed(self, number: int) -> None:
        del self._owners[number]
        self._idle_inputs.pop(number, None)

    def _add(self, owner: Owner, size_bytes: int) -> None:
        self._bytes[owner] += size_bytes
        if not self._bytes[owner]:
            del self._bytes[owner]

    def _move(self, number: int, owner: Owner) -> None:
        size_bytes = self._sizes[number]
        self._add(self._owners[number], -size_bytes)
        self._add(owner, size_bytes)
        self._owners[number] = owner

    def _end_phase(self) -> None:
        self.settle()
        self._note_peak()

    def _note_peak(self) -> None:
        # At the first moment at which less is about to live, and not at every step of the way up.
        if self._phase is not None and self._live_bytes > self.peaks[self._phase].total_bytes:
            idle = {found: size_bytes for found, size_bytes in self._idle_bytes.items() if size_bytes}
            self.peaks[self._phase] = Peak(self._live_bytes, dict(self._bytes), idle)

    def _know_module(self, module: nn.Module) -> None:
        name = self._module_names.get(module, type(module).__name__)
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None:
                continue
            if isinstance(tensor, nn.Parameter):
                self._parameters[id(tensor)] = ref(tensor)
            self.count(tensor)
            for number in self.numbers([tensor]):
                if self._owners[number].kind != "parameters":
                    # Flat storage of several parameters has no name of its own.
                    alone = self._sizes[number] == tensor.numel() * tensor.element_size()
                    self._move(number, Owner("parameters", f"{name}.{key}" if alone else "in buckets"))

    def _know_gradients(self) -> None:
        parameters = [known() for known in self._parameters.values()]
        gradients = [parameter.grad for parameter in parameters if parameter is not None]
        for number in self.numbers(gradient for gradient in gradients if gradient is not None):
            if self._owners[number].kind in ("temporary", "activations"):
                self._move(number, Owner("gradients", self._owners[number].name))

    def _time(self) -> float:
        if self._device.type == "cuda":
            # Not the device, where a receive may be under way that a neighbour answers when it has what is made here.
            torch.cuda.current_stream(self._device).synchronize()
        return perf_counter()


def open_account() -> MemoryAccount | None:
    """The account that is open now."""
    return MemoryAccount._open


def within(name: str, kind: MemoryClass = "activations") -> AbstractContextManager[None]:
    """`MemoryAccount.within` of the account that is open; nothing where none is."""
    account = open_account()
    return nullcontext() if account is None else account.within(name, kind)


def timed(name: str) -> AbstractContextManager[None]:
    """`MemoryAccount.timed` of the account that is open; nothing where none is."""
    account = open_account()
    return nullcontext() if account is None else account.timed(name)
