"""One gradient norm for the whole model, and the factor that clips to it."""

from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor


def global_norm(parts: Mapping[str, Tensor], order: float) -> Tensor:
    """The norm from the parts of `DataParallelEngine.norm_parts`, each already complete over its ranks; a scalar.

    (sum of parts)^(1/order), or the largest part for `order = inf`.
    """
    stacked = torch.stack(list(parts.values()))
    return stacked.max() if order == inf else stacked.sum() ** (1 / order)


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm / (norm + 1e-6)): multiply gradients by it. No host synchronisation."""
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)
