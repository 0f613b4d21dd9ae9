"""The layers of the decoder from its configuration, and their initial values."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from moe_kernels.experts import ExpertActivations, GroupedExperts
from moe_kernels.rope import yarn_softmax_factor
from moe_memory.initialise import InitRule, normal, ones, zeros
from moe_memory.recompute import LayerUnits
from moe_train.models.attention import Attention
from moe_train.models.block import Block, DenseBlock
from moe_train.models.config import DecoderConfig
from moe_train.models.latent_attention import LatentAttention
from moe_train.models.mlp import MLP
from moe_train.models.moe import MoELayer, SharedExpert
from moe_train.models.mtp import MTPLayer
from moe_train.models.router import Router
from moe_train.models.spec import ModelParts
from moe_train.models.units import layer_name

BuildBlock = Callable[[DecoderConfig, int, ModelParts], nn.Module]


def build_block(config: DecoderConfig, layer: int, parts: ModelParts) -> Block | DenseBlock:
    """One layer; numbers from `num_layers` on are those of multi-token prediction."""
    attention = build_attention(config, layer, parts)
    units = layer_units(config, layer, parts)
    if config.is_dense(layer):
        assert config.dense_features is not None
        mlp = MLP(config.model_features, config.dense_features, activation=config.activation, dtype=parts.dtype)
        return DenseBlock(
            config.model_features, attention, mlp, norm_eps=config.norm_eps, units=units, dtype=parts.dtype
        )
    moe = build_moe(config, layer, parts)
    return Block(config.model_features, attention, moe, norm_eps=config.norm_eps, units=units, dtype=parts.dtype)


def layer_units(config: DecoderConfig, layer: int, parts: ModelParts) -> LayerUnits:
    """What of a layer may be recomputed."""
    return LayerUnits(parts.activations, layer_name(config, layer))


def build_mtp_layer(
    config: DecoderConfig, depth: int, parts: ModelParts, *, block: BuildBlock = build_block
) -> MTPLayer:
    """The layer of one depth of multi-token prediction, counted from 0."""
    inner = block(config, config.num_layers + depth, parts)
    return MTPLayer(config.model_features, inner, norm_eps=config.norm_eps, dtype=parts.dtype)


def build_attention(config: DecoderConfig, layer: int, parts: ModelParts) -> Attention | LatentAttention:
    """The attention of one layer."""
    if config.attention == "latent":
        return LatentAttention(
            config.model_features,
            config.num_heads,
            config.head_features,
            config.latent,
            parts.attention,
            norm_eps=config.norm_eps,
            window=config.window(layer),
            softmax_factor=yarn_softmax_factor(config.yarn),
            units=layer_units(config, layer, parts),
            dtype=parts.dtype,
        )
    return Attention(
        config.model_features,
        config.num_heads,
        config.num_kv_heads,
        config.head_features,
        parts.attention,
        qk_norm=config.qk_norm,
        norm_eps=config.norm_eps,
        qkv_bias=config.qkv_bias,
        window=config.window(layer),
        softmax_factor=yarn_softmax_factor(config.yarn),
        units=layer_units(config, layer, parts),
        dtype=parts.dtype,
    )


def build_moe(config: DecoderConfig, layer: int, parts: ModelParts) -> MoELayer:
    """The Mixture of Experts of one layer."""
    features, dtype = config.model_features, parts.dtype
    router = Router(
        config.num_experts,
        features,
        config.router,
        config.balance,
        name=layer_name(config, layer),
        row=sum(not config.is_dense(before) for before in range(layer)),
        dtype=dtype,
    )
    shared = None
    if config.shared_features is not None:
        mlp = MLP(features, config.shared_features, activation=config.activation, dtype=dtype)
        gate = nn.Linear(features, 1, bias=False, dtype=dtype) if config.shared_gate else None
        shared = SharedExpert(mlp, gate)
    down = up = None
    if config.moe_latent_features is not None:
        down = nn.Linear(features, config.moe_latent_features, bias=False, dtype=dtype)
        up = nn.Linear(config.moe_latent_features, features, bias=False, dtype=dtype)
    units = layer_units(config, layer, parts)
    experts = GroupedExperts(
        config.num_experts,
        config.moe_latent_features or features,
        config.expert_features,
        activation=config.activation,
        backend=parts.grouped_gemm,
        units=RoutedUnits(units),
        dtype=dtype,
    )
    return MoELayer(
        router,
        parts.dispatcher,
        experts,
        shared=shared,
        latent_down=down,
        latent_up=up,
        capacity=config.capacity,
        sizing=parts.sizing,
        units=units,
    )


@dataclass(frozen=True)
class RoutedUnits:
    """The units inside the routed experts of a layer (`moe_kernels.experts.ExpertUnits`)."""

    units: LayerUnits

    def making(self) -> AbstractContextManager[object]:
        return self.units.making("moe_act")

    def consumed(self, found: ExpertActivations) -> None:
        # Inputs come back first, since what is made again of them is needed next.
        self.units.idle("expert_fc1", (found.rows_RD,), found.y_RD)
        self.units.idle("moe_act", (found.h_RF2,), found.y_RD)
        self.units.consumed("moe_act", (found.a_RF,), found.y_RD, found.again, *found.kept)


def decoder_init_rules(config: DecoderConfig) -> list[tuple[str, InitRule]]:
    """Initial values by global name."""
    std = config.init_std
    residual = normal(std / (2 * config.num_layers) ** 0.5)
    rules = [("*norm.weight", ones()), ("*.o_proj.weight", residual)]
    if config.qkv_bias:
        rules.append(("*_proj.bias", zeros()))
    if config.dense_layers or config.shared_features is not None:
        rules.append(("*.mlp.down_proj.weight", residual))
    # Where the experts work at another width, it is the projection behind them that ends in the residual stream.
    last = "*.experts.w2_EFD" if config.moe_latent_features is None else "*.latent_up.weight"
    return [*rules, (last, residual), ("*", normal(std))]
