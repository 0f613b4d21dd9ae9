"""Muon over flat buffers: momentum, orthogonalised matrix by matrix.

K. Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024); weight decay and the scale that makes one
learning rate serve AdamW, too, are those of arXiv 2502.16982.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from moe_memory.config import OptimConfig
from moe_memory.optim.buffer import Buffer, keep, work_on
from moe_memory.optim.orthogonal import orthogonalised
from moe_memory.optim.owners import WholeMatrices
from moe_memory.optim.rules import UpdateRule
from moe_memory.optim.slots import Slot
from moe_parallel import Groups, ParameterKind, ShardSpec

# Ranks that may hold parts of one matrix; those of `ep` have other experts.
_AXES = {ParameterKind.DENSE: ("tp", "cp", "dp"), ParameterKind.EXPERT: ("etp", "edp")}


class Muon:
    """The update of those buffers whose rule says so, all in one go, as ranks work on each other's matrices.

    The gradient buffer takes the momentum and then the update, so that nothing else is allocated for the whole.

    Args:
        config: of the optimizer.
        parameters: what Muon updates on the ranks of this pipeline stage, in the same order on all of them.
        buffers: of this rank.
        device: of the buffers.
        seed: of stochastic rounding.
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
    ) -> None:
        self._config = config
        self._seed = seed
        self._buffers = list(buffers)
        boxes = {part.name: part.box for buffer in buffers for part in buffer.parts}
        self._whole: list[WholeMatrices] = []
        for kind, axes in _AXES.items():
            here = [(spec, rule) for spec, rule in parameters if spec.kind is kind]
            if here:
                rows = [(spec, rule.rows) for spec, rule in here]
                dtype = torch.bfloat16 if config.muon.dtype == "bfloat16" else here[0][1].internal
                self._whole.append(WholeMatrices(rows, boxes, device, dtype, groups.group(*axes)))

    @torch.no_grad()
    def update(
        self,
        slots: Sequence[Slot],
        gradients: Sequence[Tensor],
        *,
        learning_rate: float,
        gradient_factor: Tensor | float,
        updates: int,
        homes: Sequence[tuple[AbstractContextManager[None], AbstractContextManager[None]]],
        updated: Callable[[int], None],
    ) -> None:
        """One update of every buffer.

        Args:
            slots: the momentum of each buffer.
            gradients: laid out as the weights; they are overwritten.
            gradient_factor: gradients are multiplied by it.
            updates: so far, for stochastic rounding.
            homes: of the momentum and of the weights of each buffer, inside of which they are here.
            updated: is told the index of each buffer when its update is made.
        """
        parts: dict[str, Tensor] = {}
        for buffer, slot, gradient, (home, _) in zip(self._buffers, slots, gradients, homes, strict=True):
            with home:
                self._accumulate(buffer, slot, gradient, gradient_factor, updates)
            for part in buffer.parts:
                parts[part.name] = gradient[part.start : part.start + part.elements].view(part.box.shape)
        for whole in self._whole:
            whole.update(parts, self._orthogonalise)
        for index, (buffer, gradient) in enumerate(zip(self._buffers, gradients, strict=True)):
            with homes[index][1]:
                self._apply(buffer, gradient, learning_rate, updates)
                updated(index)

    def _accumulate(
        self, buffer: Buffer, slot: Slot, gradient: Tensor, gradient_factor: Tensor | float, updates: int
    ) -> None:
        """Momentum to its slot, and what is to be orthogonalised to the gradient."""
        config = self._config.muon
        for chunk in buffer.chunks():
            here = chunk.of(gradient)
            momentum = slot.read(chunk, buffer.rule.internal)
            scaled = work_on(here, buffer.rule.internal).mul_(gradient_factor)
            momentum.mul_(config.momentum).add_(scaled)
            rounded = slot.values.dtype == torch.bfloat16
            slot.write(chunk, momentum, chunk.random_bits(self._seed, updates, here.device) if rounded else None)
            keep(here, scaled.add_(momentum, alpha=config.momentum) if config.nesterov else momentum)

    def _orthogonalise(self, matrices: list[Tensor]) -> list[Tensor]:
        """Those of one shape together."""
        config = self._config.muon
        results: dict[int, Tensor] = {}
        shapes: dict[tuple[int, ...], list[int]] = {}
        for index, matrix in enumerate(matrices):
            shapes.setdefault(tuple(matrix.shape), []).append(index)
        for shape, indices in shapes.items():
            batch = orthogonalised(torch.stack([matrices[index] for index in indices]), config.steps)
            batch = batch * (config.scale * max(shape) ** 0.5)
            results.update(zip(indices, batch.unbind(), strict=True))
        return [results[index] for index in range(len(matrices))]

    def _apply(self, buffer: Buffer, update: Tensor, learning_rate: float, updates: int) -> None:
        rule = buffer.rule
        rate = learning_rate * rule.lr_scale
        for chunk in buffer.chunks():
            stored = chunk.of(buffer.weights)
            weight = work_on(stored, rule.internal).mul_(1 - rate * rule.weight_decay)
            weight.add_(work_on(chunk.of(update), rule.internal), alpha=-rate)
            rounded = rule.master == torch.bfloat16
            bits = chunk.random_bits(self._seed, updates, stored.device) if rounded else None
            keep(stored, weight, bits, "master")
