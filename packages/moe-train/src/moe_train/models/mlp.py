"""A dense gated feed-forward network: that of layers without experts, and the shared expert.

Shape legend: D model, F inner features.
"""

import torch
from torch import Tensor, nn

from moe_kernels import gated_activation
from moe_kernels.activation import Activation


class MLP(nn.Module):
    """(act(x W_gate) * (x W_up)) W_down, the first two as one product with gate and up side by side."""

    def __init__(self, model_features: int, features: int, *, activation: Activation, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.gate_up_proj = nn.Linear(model_features, 2 * features, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(features, model_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[.., D] to the same shape."""
        h = self.gate_up_proj(x)
        a = gated_activation(h.flatten(0, -2), None, self.activation)
        y: Tensor = self.down_proj(a.view(*h.shape[:-1], -1))
        return y
