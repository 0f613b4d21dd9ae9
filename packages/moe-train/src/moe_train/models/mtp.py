"""Multi-token prediction (MTP, arXiv 2412.19437): a layer that predicts one token further than the one before it.

Shape legend: T tokens, D model.
"""

import torch
from torch import Tensor, nn

from moe_kernels.norm import RMSNorm
from moe_memory.recompute import Replay
from moe_parallel import SequenceInfo
from moe_train.models.statistics import RouterStatistics
from moe_train.scale import RoutingScale


class MTPLayer(nn.Module):
    """`norm(block(projection([norm(e), norm(h)])))`.

    h are the features from which the depth before predicts (those of the model behind its last norm, for the first), e
    the embedding of the token that it predicts. The output goes through the model's own output projection.
    """

    def __init__(self, model_features: int, block: nn.Module, *, norm_eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding_norm = RMSNorm(model_features, norm_eps, dtype=dtype)
        self.hidden_norm = RMSNorm(model_features, norm_eps, dtype=dtype)
        self.projection = nn.Linear(2 * model_features, model_features, bias=False, dtype=dtype)
        self.block = block
        self.norm = RMSNorm(model_features, norm_eps, dtype=dtype)

    def forward(
        self,
        replay: Replay,
        h_TD: Tensor,
        e_TD: Tensor,
        info: SequenceInfo,
        rope: tuple[Tensor, Tensor],
        scale: RoutingScale | None,
    ) -> tuple[Tensor, RouterStatistics | None]:
        x_TD = self.projection(torch.cat((self.embedding_norm(e_TD), self.hidden_norm(h_TD)), -1))
        x_TD, statistics = self.block(replay, x_TD, info, rope, scale)
        return self.norm(x_TD), statistics
