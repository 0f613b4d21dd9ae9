"""AdamW over flat buffers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_memory.config import OptimConfig


class AdamW:
    """AdamW (arXiv 1711.05101) with torch's fused kernel; bit-equal to it tensor by tensor, on CPU and CUDA.

    Args:
        config: of the optimizer.
        weights: the buffers, and whether each is decayed. They stay the caller's and are updated in place.

    Attributes:
        updates: updates so far; they enter the bias correction.
    """

    SLOTS = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimConfig, weights: Sequence[tuple[Tensor, bool]]) -> None:
        self._weights = [weight for weight, _ in weights]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": [weight], "weight_decay": config.weight_decay if decayed else 0.0}
                for weight, decayed in weights
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        for weight in self._weights:
            # What torch would create at the first step, created now, so that a checkpoint can be loaded into it.
            self._optimizer.state[weight] = {
                "step": torch.zeros((), dtype=torch.float32, device=weight.device),
                **{slot: torch.zeros_like(weight) for slot in self.SLOTS},
            }
        self._updates = 0

    @property
    def updates(self) -> int:
        return self._updates

    @updates.setter
    def updates(self, updates: int) -> None:
        self._updates = updates
        for weight in self._weights:
            self._optimizer.state[weight]["step"].fill_(updates)

    def slot(self, weight: Tensor, name: str) -> Tensor:
        """The live moment of a buffer, in its shape and dtype; `name` is one of `SLOTS`."""
        moment: Tensor = self._optimizer.state[weight][name]
        return moment

    def step(self, learning_rate: float, gradients: Sequence[Tensor]) -> None:
        """One update of every buffer with the gradient of the same index."""
        for weight, gradient, group in zip(self._weights, gradients, self._optimizer.param_groups, strict=True):
            weight.grad = gradient
            group["lr"] = learning_rate
        self._optimizer.step()
        self._updates += 1
        for weight in self._weights:
            weight.grad = None
