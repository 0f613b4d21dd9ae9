"""`Routing`: which experts each token chose, and with which probability.

Shape legend: T tokens here, K choices per token, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The choices of T tokens.

    Attributes:
        ids_TK: int64 global expert ids; -1 is "no expert" (padding token, dropped choice). Duplicates are allowed.
        probs_TK: combine weight of each choice, in the internal dtype; part of the autograd graph.
        num_experts: E, over all ranks.
    """

    ids_TK: Tensor
    probs_TK: Tensor
    num_experts: int

    def counts_E(self) -> Tensor:
        """Number of choices per expert, int64, on the device of the ids; no host synchronisation."""
        ids = self.ids_TK.reshape(-1)
        counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=ids.device)
        ones = torch.ones_like(ids)
        return counts.scatter_add_(0, torch.where(ids < 0, self.num_experts, ids), ones)[:-1]
