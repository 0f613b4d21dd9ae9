"""AdamW over flat buffers."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# The function, not the class: making the class imports torch's compiler, which takes longer than importing torch.
from torch.optim.adamw import adamw

from moe_memory.config import OptimConfig


class AdamW:
    """AdamW (arXiv 1711.05101) with torch's fused kernel; over flat buffers of several parameters.

    Args:
        config: of the optimizer.
        weights: the buffers, on one device, and whether each is decayed. They stay the caller's and are updated in
            place.

    Attributes:
        updates: updates so far; they enter the bias correction.
    """

    SLOTS = ("exp_avg", "exp_avg_sq")

    def __init__(self, config: OptimConfig, weights: Sequence[tuple[Tensor, bool]]) -> None:
        self.updates = 0
        self._config = config
        self._weights = list(weights)
        self._moments = {slot: [torch.zeros_like(weight) for weight, _ in weights] for slot in self.SLOTS}
        self._count = torch.zeros((), dtype=torch.float32, device=weights[0][0].device)

    def slot(self, index: int, name: str) -> Tensor:
        """The live moment of a buffer, in its shape and dtype; `name` is one of `SLOTS`."""
        return self._moments[name][index]

    @torch.no_grad()
    def step(
        self,
        learning_rate: float,
        gradients: Sequence[Tensor],
        updated: Callable[[int], None] = lambda index: None,
    ) -> None:
        """One update of every buffer with the gradient of the same index; each index is told when its is made."""
        config = self._config
        for index, ((weight, decayed), gradient) in enumerate(zip(self._weights, gradients, strict=True)):
            adamw(
                [weight],
                [gradient],
                [self.slot(index, "exp_avg")],
                [self.slot(index, "exp_avg_sq")],
                [],
                [self._count.fill_(self.updates)],  # the kernel counts it up
                fused=True,
                amsgrad=False,
                maximize=False,
                lr=learning_rate,
                beta1=config.beta1,
                beta2=config.beta2,
                eps=config.eps,
                weight_decay=config.weight_decay if decayed else 0.0,
            )
            updated(index)
        self.updates += 1
