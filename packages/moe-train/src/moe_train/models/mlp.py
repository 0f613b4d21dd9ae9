"""A dense gated feed-forward network: that of layers without experts, and the shared expert.

Shape legend: D model, F inner features.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels import gated_activation
from moe_kernels.activation import Activation


class GateUp(nn.Module):
    """Gate and up projection as one product, from D to 2F features side by side; the weight is [2, F, D]."""

    def __init__(self, model_features: int, features: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2, features, model_features, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """[.., D] to [.., 2F]."""
        return F.linear(x, self.weight.flatten(0, 1))


class MLP(nn.Module):
    """(act(x W_gate) * (x W_up)) W_down."""

    def __init__(self, model_features: int, features: int, *, activation: Activation, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation: Activation = activation
        self.gate_up_proj = GateUp(model_features, features, dtype=dtype)
        self.down_proj = nn.Linear(features, model_features, bias=False, dtype=dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] to the same shape."""
        a_TF = gated_activation(self.gate_up_proj(x_TD), None, self.activation)
        y_TD: Tensor = self.down_proj(a_TF)
        return y_TD
