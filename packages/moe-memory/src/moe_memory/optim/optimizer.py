"""`Optimizer`: the update of all buffers of an engine, each by the optimizer that its rule names, and their state."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from moe_memory.config import OptimConfig
from moe_memory.copies import CopyEngine, copies_of
from moe_memory.optim.adamw import AdamW
from moe_memory.optim.buffer import Buffer, Part
from moe_memory.optim.home import Departures, Home
from moe_memory.optim.host import HostUpdates
from moe_memory.optim.muon import Muon
from moe_memory.optim.rules import UpdateRule
from moe_memory.optim.slots import Slot
from moe_parallel import Box, Groups, ParameterKind, ShardSpec

# In the order of a checkpoint.
SLOT_NAMES = ("master", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
# State of so many buffers is on its way back while one is updated.
_AHEAD = 2


class Optimizer:
    """One update after another of the same buffers.

    Args:
        config: of the optimizer.
        parameters: all that this rank holds something of, in the order of the model.
        buffers: on one device; their weights stay the caller's and are updated in place. Those that may leave are
            released between updates if the configuration offloads state.
        groups: of this rank.
        seed: of the run.
        copies: of state that is offloaded, by default the engine of the device.

    Attributes:
        updates: so far.
    """

    def __init__(
        self,
        config: OptimConfig,
        parameters: Sequence[tuple[ShardSpec, UpdateRule]],
        buffers: Sequence[Buffer],
        groups: Groups,
        device: torch.device,
        *,
        seed: int = 0,
        copies: CopyEngine | None = None,
    ) -> None:
        self.updates = 0
        self._copies = None if config.offload == "none" else copies or copies_of(device)
        self._buffers = list(buffers)
        self._adamw = AdamW(config, seed)
        self._host = HostUpdates(device, self._copies)
        for index in _on_host(config, buffers):
            self._buffers[index] = self._host.take(index, buffers[index])
        self._slots: list[list[Slot]] = []
        self._homes: list[tuple[Home, Home]] = []
        self._departures: Departures = Departures()
        # One buffer after the other, so that the state of all is never on the device at once.
        for index, buffer in enumerate(self._buffers):
            self._slots.append([Slot(buffer, name, dtype) for name, dtype in buffer.rule.slots])
            self._homes.append(self._home(index))
            if index not in self._host:
                self._homes[index][0].leave()
        self._muon_indices = [index for index, buffer in enumerate(buffers) if buffer.rule.kind == "muon"]
        self._adamw_indices = [
            index for index, buffer in enumerate(buffers) if buffer.rule.kind == "adamw" and index not in self._host
        ]
        ours = [(spec, rule) for spec, rule in parameters if rule.kind == "muon"]
        self._muon = (
            Muon(config, ours, [buffers[index] for index in self._muon_indices], groups, device, seed=seed)
            if ours
            else None
        )

    def prepare(self, gradients: Sequence[Tensor]) -> None:
        """Gradients are complete: begin to bring back the state that is needed first, and to take gradients away."""
        self._host.send(gradients)
        for index in self._adamw_indices[:_AHEAD]:
            self._fetch(index)

    def step(
        self,
        learning_rate: float,
        gradients: Sequence[Tensor],
        gradient_factor: Tensor | float = 1.0,
        updated: Callable[[int, Tensor | None], None] = lambda index, weights: None,
    ) -> None:
        """One update of every buffer with the gradient of the same index, which may be changed.

        Where there are matrices for Muon it communicates: all ranks of a pipeline stage come together.

        Args:
            gradient_factor: gradients are multiplied by it.
            updated: is told the index of each buffer when its update is made, and its weights in the dtype in which the
                model computes, where those of the buffer are not on the device. Buffers of AdamW come first.
        """
        for place, index in enumerate(self._adamw_indices):
            for other in self._adamw_indices[place : place + 1 + _AHEAD]:
                self._fetch(other)
            slots, weights = self._homes[index]
            with slots, weights:
                self._update_by_adamw(index, gradients[index], learning_rate, gradient_factor)
                updated(index, None)
        if self._host:
            factor = gradient_factor.cpu() if isinstance(gradient_factor, Tensor) else gradient_factor
            self._host.run(
                gradients,
                lambda index, gradient: self._update_by_adamw(index, gradient, learning_rate, factor),
                updated,
            )
        if self._muon is not None:
            self._muon.update(
                [self._slots[index][0] for index in self._muon_indices],
                [gradients[index] for index in self._muon_indices],
                learning_rate=learning_rate,
                gradient_factor=gradient_factor,
                updates=self.updates,
                homes=[self._homes[index] for index in self._muon_indices],
                updated=lambda place: updated(self._muon_indices[place], None),
            )
        self.updates += 1

    def drop_gradients(self) -> None:
        """Forget those of `prepare`, if no step has used them."""
        self._host.drop()

    @contextmanager
    def present(self, index: int) -> Iterator[Tensor | None]:
        """The weights of a buffer are on the device inside: in the buffer if this yields None, else in what it yields,
        in the dtype in which the model computes."""
        if index in self._host:
            yield self._host.weights(index)
            return
        with self._homes[index][1]:
            yield None

    def state(self, index: int, part: Part) -> Iterator[tuple[str, tuple[int, ...], Box, Tensor]]:
        """Of a part of a buffer: name of the slot, one of `SLOT_NAMES`, whole shape, box, live tensor.

        Tensors are where the state is now, and what was under way has arrived.
        """
        home_of_slots, home_of_weights = self._homes[index]
        weights = home_of_weights.current(self._buffers[index].weights)
        yield "master", part.spec.shape, part.box, weights[part.start : part.start + part.elements].view(part.box.shape)
        for slot in self._slots[index]:
            yield from slot.state(part, home_of_slots.current)

    def _update_by_adamw(
        self, index: int, gradient: Tensor, learning_rate: float, gradient_factor: Tensor | float
    ) -> None:
        self._adamw.update(
            self._buffers[index],
            self._slots[index],
            gradient,
            learning_rate=learning_rate,
            gradient_factor=gradient_factor,
            updates=self.updates,
        )

    def _home(self, index: int) -> tuple[Home, Home]:
        """Of the slots, and of the weights; what the host updates is always there."""
        copies = None if index in self._host else self._copies
        buffer = self._buffers[index]
        slots = [tensor for slot in self._slots[index] for tensor in slot.tensors()]
        weights = [buffer.weights] if buffer.may_leave else []
        return Home(slots, copies, self._departures), Home(weights, copies, self._departures)

    def _fetch(self, index: int) -> None:
        for home in self._homes[index]:
            home.fetch()


def _on_host(config: OptimConfig, buffers: Sequence[Buffer]) -> list[int]:
    """Buffers that the host updates: of each kind from the first on, up to the share that is configured.

    Of each kind, since ranks that gather the weights of one hold equally much of it and not of the other. They must
    choose alike, for weights are gathered in the order of the updates. So must ranks that hold copies, which host and
    device would round differently; as they may hold anything else besides, they share only what is everything.
    """
    if config.offload != "step":
        return []
    is_everything = config.offload_fraction == 1.0
    found = []
    for kind in ParameterKind:
        able = [
            (index, buffer.weights.numel())
            for index, buffer in enumerate(buffers)
            if buffer.kind is kind
            and buffer.rule.kind == "adamw"
            and buffer.may_leave
            and (is_everything or not buffer.has_copies)
        ]
        room = config.offload_fraction * sum(elements for _, elements in able)
        for index, elements in able:
            room -= elements
            if room < 0:
                break
            found.append(index)
    return sorted(found)
