"""AdamW over flat buffers, with weights and moments in dtypes of their own."""

from collections.abc import Sequence

import torch
from torch import Tensor

# The function, not the class: making the class imports torch's compiler, which takes longer than importing torch.
from torch.optim.adamw import adamw

from moe_memory.config import OptimConfig
from moe_memory.optim.buffer import VECTOR, Buffer, keep, work_on
from moe_memory.optim.slots import Slot


class AdamW:
    """AdamW (arXiv 1711.05101) with torch's fused kernel.

    Where weights, gradients and moments have the dtype of the arithmetic, and fill whole vectors, a buffer is one call
    of the kernel. Else chunks of it are brought to that dtype, updated by the same kernel and brought back: nothing is
    ever whole in it.

    Args:
        config: of the optimizer.
        seed: of stochastic rounding.
    """

    def __init__(self, config: OptimConfig, seed: int = 0) -> None:
        self._config = config
        self._seed = seed

    @torch.no_grad()
    def update(
        self,
        buffer: Buffer,
        slots: Sequence[Slot],
        gradient: Tensor,
        *,
        learning_rate: float,
        gradient_factor: Tensor | float,
        updates: int,
    ) -> None:
        """One update of a buffer.

        Args:
            gradient: laid out as the weights; may be changed.
            gradient_factor: the gradient is multiplied by it.
            updates: so far; they enter the bias correction.
        """
        rule = buffer.rule
        if rule.is_plain and buffer.weights.numel() % VECTOR == 0:
            gradient.mul_(gradient_factor)
            self._kernel(buffer, buffer.weights, gradient, [slot.values for slot in slots], learning_rate, updates)
            return
        rounded = torch.bfloat16 in (rule.master, *(dtype for _, dtype in rule.slots))
        for chunk in buffer.chunks():
            stored = chunk.of(buffer.weights)
            weight = work_on(stored, rule.internal)
            moments = [slot.read(chunk, rule.internal) for slot in slots]
            scaled = work_on(chunk.of(gradient), rule.internal).mul_(gradient_factor)
            self._kernel(buffer, weight, scaled, moments, learning_rate, updates)
            bits = chunk.random_bits(self._seed, updates, stored.device) if rounded else None
            for slot, moment in zip(slots, moments, strict=True):
                slot.write(chunk, moment, bits)
            keep(stored, weight, bits, "master")

    def _kernel(
        self,
        buffer: Buffer,
        weight: Tensor,
        gradient: Tensor,
        moments: Sequence[Tensor],
        learning_rate: float,
        updates: int,
    ) -> None:
        config = self._config
        exp_avg, exp_avg_sq = moments
        adamw(
            [weight],
            [gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            # The kernel counts it up.
            [torch.full((), updates, dtype=torch.float32, device=weight.device)],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=learning_rate * buffer.rule.lr_scale,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=buffer.rule.weight_decay,
        )
