"""One Transformer layer: attention, then a feed-forward part, each after a norm and added to the residual stream.

The residual stream is a list of tokens [T, D]; who reads them by rows takes the rows from `SequenceInfo`.
"""

import torch
from torch import Tensor, nn

from moe_kernels.norm import RMSNorm
from moe_memory.recompute import KEPT_UNITS, LayerUnits, Replay
from moe_parallel import SequenceInfo
from moe_train.models.mlp import MLP
from moe_train.models.moe import MoELayer, Routed
from moe_train.models.statistics import RouterStatistics
from moe_train.scale import RoutingScale


class Block(nn.Module):
    """`x + attention(norm(x))`, then `x + moe(norm(x))`."""

    def __init__(
        self,
        model_features: int,
        attention: nn.Module,
        moe: MoELayer,
        *,
        norm_eps: float,
        units: LayerUnits = KEPT_UNITS,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.units = units
        self.attention_norm = RMSNorm(model_features, norm_eps, dtype=dtype)
        self.attention = attention
        self.moe_norm = RMSNorm(model_features, norm_eps, dtype=dtype)
        self.moe = moe

    def forward(
        self,
        replay: Replay,
        x_TD: Tensor,
        info: SequenceInfo,
        rope: tuple[Tensor, Tensor],
        scale: RoutingScale | None,
    ) -> tuple[Tensor, RouterStatistics]:
        opened_TD = x_TD
        x_TD, normed_TD, routed = self.opening(x_TD, info, rope, scale)
        y_TD, statistics = self.units.run("moe", self._mix, normed_TD, info, scale, routed, replay=replay)
        z_TD = x_TD + y_TD
        # The norms' own inputs come back first, since what is made again of them is needed next.
        self.units.idle("mlp_norm", (x_TD,), z_TD)
        self.units.idle("attn_norm", (opened_TD,), z_TD)
        self.units.consumed("layernorm", (normed_TD,), y_TD, self.moe_norm, x_TD)
        return z_TD, statistics

    def _mix(
        self,
        replay: Replay,
        normed_TD: Tensor,
        info: SequenceInfo,
        scale: RoutingScale | None,
        routed: Routed | None,
    ) -> tuple[Tensor, RouterStatistics]:
        found: tuple[Tensor, RouterStatistics]
        found = self.moe(normed_TD, info.valid_BS.flatten(), scale, replay, info, routed)
        return found

    def attend(self, x_TD: Tensor, info: SequenceInfo, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """The residual stream behind attention, and that normalised."""
        with self.units.making("layernorm"):
            normed_TD = self.attention_norm(x_TD)
        with self.units.within("attention"):
            attended_TD = self.attention(normed_TD, info, rope)
        self.units.idle("qkv_linear", (normed_TD,), attended_TD)
        self.units.consumed("layernorm", (normed_TD,), attended_TD, self.attention_norm, x_TD)
        with self.units.making("layernorm"):
            normed_TD, x_TD = self.moe_norm(attended_TD, x_TD)
        return x_TD, normed_TD

    def opening(
        self, x_TD: Tensor, info: SequenceInfo, rope: tuple[Tensor, Tensor], scale: RoutingScale | None
    ) -> tuple[Tensor, Tensor, Routed | None]:
        """`attend`, and what the router finds where it is asked before the experts are: in graphs, which are called in
        the place of this (`moe_train.graphs`)."""
        return (*self.attend(x_TD, info, rope), None)


class DenseBlock(nn.Module):
    """`x + attention(norm(x))`, then `x + mlp(norm(x))`."""

    def __init__(
        self,
        model_features: int,
        attention: nn.Module,
        mlp: MLP,
        *,
        norm_eps: float,
        units: LayerUnits = KEPT_UNITS,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.units = units
        self.attention_norm = RMSNorm(model_features, norm_eps, dtype=dtype)
        self.attention = attention
        self.mlp_norm = RMSNorm(model_features, norm_eps, dtype=dtype)
        self.mlp = mlp

    def forward(
        self,
        replay: Replay,
        x_TD: Tensor,
        info: SequenceInfo,
        rope: tuple[Tensor, Tensor],
        scale: RoutingScale | None,
    ) -> tuple[Tensor, None]:
        """As `Block`; there is no router, so there are no statistics."""
        opened_TD = x_TD
        x_TD, normed_TD, _ = self.opening(x_TD, info, rope, scale)
        y_TD = self.units.run("mlp", lambda _, normed_TD: self.mlp(normed_TD), normed_TD)
        z_TD = x_TD + y_TD
        # The norms' own inputs come back first, since what is made again of them is needed next.
        self.units.idle("mlp_norm", (x_TD,), z_TD)
        self.units.idle("attn_norm", (opened_TD,), z_TD)
        self.units.consumed("layernorm", (normed_TD,), y_TD, self.mlp_norm, x_TD)
        return z_TD, None

    def attend(self, x_TD: Tensor, info: SequenceInfo, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """As `Block`."""
        with self.units.making("layernorm"):
            normed_TD = self.attention_norm(x_TD)
        with self.units.within("attention"):
            attended_TD = self.attention(normed_TD, info, rope)
        self.units.idle("qkv_linear", (normed_TD,), attended_TD)
        self.units.consumed("layernorm", (normed_TD,), attended_TD, self.attention_norm, x_TD)
        with self.units.making("layernorm"):
            normed_TD, x_TD = self.mlp_norm(attended_TD, x_TD)
        return x_TD, normed_TD

    def opening(
        self, x_TD: Tensor, info: SequenceInfo, rope: tuple[Tensor, Tensor], scale: RoutingScale | None
    ) -> tuple[Tensor, Tensor, None]:
        """As `Block`."""
        return (*self.attend(x_TD, info, rope), None)
