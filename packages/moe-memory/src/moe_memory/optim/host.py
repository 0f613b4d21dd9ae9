"""`HostUpdates`: buffers whose weights and state live in host memory and are updated there.

Gradients go there when they are complete, and weights come back in the dtype in which the model computes. While one
buffer is updated the gradients of the next are arriving and the weights of the one before it leave.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from moe_memory.copies import CopyEngine
from moe_memory.optim.buffer import Buffer
from moe_parallel import Pending


class HostUpdates:
    """The buffers, by index.

    Args:
        device: of the model.
        copies: between it and the host; None where no buffer is taken.
    """

    def __init__(self, device: torch.device, copies: CopyEngine | None) -> None:
        self._device = device
        self._copies = copies
        self._buffers: dict[int, Buffer] = {}
        self._gradients: dict[int, Pending[Tensor]] = {}

    def __contains__(self, index: int) -> bool:
        return index in self._buffers

    def __bool__(self) -> bool:
        return bool(self._buffers)

    def take(self, index: int, buffer: Buffer) -> Buffer:
        """The buffer with its weights in host memory; those on the device are released."""
        copies = self._engine()
        pending = copies.to_host(buffer.weights)
        copies.release(buffer.weights)
        self._buffers[index] = replace(buffer, weights=pending.wait())
        return self._buffers[index]

    def send(self, gradients: Sequence[Tensor]) -> None:
        """Begin to bring gradients to the host."""
        for index in self._buffers:
            if index not in self._gradients:
                self._gradients[index] = self._engine().to_host(gradients[index])

    def run(
        self,
        gradients: Sequence[Tensor],
        update: Callable[[int, Tensor], None],
        updated: Callable[[int, Tensor | None], None],
    ) -> None:
        """Update every buffer with its gradient.

        Args:
            gradients: on the device; they are sent if they were not.
            update: of the buffer of an index, with its gradient on the host.
            updated: is told the index and the weights on the device, which are for the caller to keep.
        """
        self.send(gradients)
        before: tuple[int, Pending[Tensor]] | None = None
        for index in self._buffers:
            update(index, self._gradients.pop(index).wait())
            if before is not None:
                updated(before[0], before[1].wait())
            before = index, self._send_weights(index)
        if before is not None:
            updated(before[0], before[1].wait())

    def drop(self) -> None:
        """Forget gradients that were sent."""
        for pending in self._gradients.values():
            pending.wait()
        self._gradients.clear()

    def weights(self, index: int) -> Tensor:
        """The weights on the device, in the dtype in which the model computes."""
        return self._send_weights(index).wait()

    def _send_weights(self, index: int) -> Pending[Tensor]:
        buffer = self._buffers[index]
        copies = self._engine()
        # Not the weights themselves, which a checkpoint may change before they have arrived; nor memory that was sent
        # before, for which nobody has waited on the host.
        sent = copies.host_empty(torch.empty_like(buffer.weights, dtype=buffer.compute)).copy_(buffer.weights)
        return copies.to_device(sent, torch.empty_like(sent, device=self._device))

    def _engine(self) -> CopyEngine:
        assert self._copies is not None, "only what is offloaded is updated on the host"
        return self._copies
