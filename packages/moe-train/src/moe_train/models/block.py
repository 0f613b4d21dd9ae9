"""One Transformer layer: attention, then a feed-forward part, each after a norm and added to the residual stream."""

import torch
from torch import Tensor, nn

from moe_kernels.norm import RMSNorm
from moe_memory.recompute import Replay
from moe_parallel import SequenceInfo
from moe_train.models.mlp import MLP
from moe_train.models.moe import MoELayer
from moe_train.models.statistics import RouterStatistics
from moe_train.scale import MicrobatchScale


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + moe(norm(x))`."""

    def __init__(
        self, model_features: int, attention: nn.Module, moe: MoELayer, *, norm_eps: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model_features, norm_eps, dtype=dtype)
        self.attention = attention
        self.moe_norm = RMSNorm(model_features, norm_eps, dtype=dtype)
        self.moe = moe

    def forward(
        self,
        replay: Replay,
        x_BSD: Tensor,
        info: SequenceInfo,
        rope: tuple[Tensor, Tensor],
        scale: MicrobatchScale | None,
    ) -> tuple[Tensor, RouterStatistics]:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), info, rope)
        y_BSD, statistics = self.moe(self.moe_norm(x_BSD), info.valid_BS, scale, replay)
        return x_BSD + y_BSD, statistics


class DenseBlock(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(
        self, model_features: int, attention: nn.Module, mlp: MLP, *, norm_eps: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(model_features, norm_eps, dtype=dtype)
        self.attention = attention
        self.mlp_norm = RMSNorm(model_features, norm_eps, dtype=dtype)
        self.mlp = mlp

    def forward(
        self,
        replay: Replay,
        x_BSD: Tensor,
        info: SequenceInfo,
        rope: tuple[Tensor, Tensor],
        scale: MicrobatchScale | None,
    ) -> tuple[Tensor, None]:
        """As `Block`; there is no router, so there are no statistics."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), info, rope)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD)), None
