"""The decoder family: embedding, layers, norm, output projection.

Shape legend: B sequences, S slots, D model, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.experts import GroupedExperts
from moe_kernels.norm import RMSNorm
from moe_kernels.rope import rope_tables
from moe_memory.initialise import InitRule, normal, ones
from moe_memory.recompute import ActivationPolicy, run_unit
from moe_parallel import SequenceInfo
from moe_parallel.pipeline.chunk import Segment
from moe_train.models.attention import Attention
from moe_train.models.block import Block
from moe_train.models.config import DecoderConfig
from moe_train.models.moe import MoELayer
from moe_train.models.router import Router
from moe_train.models.spec import ModelParts
from moe_train.models.statistics import RouterStatistics
from moe_train.scale import MicrobatchScale


@dataclass(frozen=True, kw_only=True)
class DecoderOutput:
    """What one forward gives.

    Attributes:
        logits_BSV: scores of the next token, in the compute dtype.
        statistics: of the router of every layer.
    """

    logits_BSV: Tensor
    statistics: RouterStatistics


@dataclass
class DecoderContext:
    """What the segments of one forward share.

    Attributes:
        info, scale: of the microbatch.
        rope: rotary tables of its positions.
        statistics: of the layers so far.
    """

    info: SequenceInfo
    scale: MicrobatchScale | None
    rope: tuple[Tensor, Tensor]
    statistics: list[RouterStatistics] = field(default_factory=list)


class Decoder(nn.Module):
    """A decoder-only Transformer; it knows no rank and no backend.

    Parameters are uninitialised, on the current default device. Input and output embedding are one parameter where the
    configuration ties them.
    """

    def __init__(self, config: DecoderConfig, vocab_size: int, parts: ModelParts) -> None:
        super().__init__()
        self.rotary_features = config.head_features
        self.rope_base = config.rope_base
        self.dtype = parts.dtype
        self.activations: ActivationPolicy = parts.activations
        self.embedding = nn.Embedding(vocab_size, config.model_features, dtype=parts.dtype)
        self.layers = nn.ModuleList(build_block(config, layer, parts) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.model_features, config.norm_eps, dtype=parts.dtype)
        self.head = None
        if not config.tied_embeddings:
            self.head = nn.Linear(config.model_features, vocab_size, bias=False, dtype=parts.dtype)

    def forward(self, token_BS: Tensor, info: SequenceInfo, scale: MicrobatchScale | None = None) -> DecoderOutput:
        """Run the model on an execution microbatch; `scale` attaches the balance losses (training only)."""
        context, x = self.context(info, scale), token_BS
        for segment in self.segments():
            x = segment.run(x, context)
        return DecoderOutput(logits_BSV=x, statistics=RouterStatistics.stack(context.statistics))

    def context(self, info: SequenceInfo, scale: MicrobatchScale | None) -> DecoderContext:
        """What the segments of one forward need besides their input."""
        rope = rope_tables(info.position_BS, self.rotary_features, self.rope_base, self.dtype)
        return DecoderContext(info=info, scale=scale, rope=rope)

    def segments(self) -> list[Segment[DecoderContext]]:
        """The forward in pieces: tokens to features, each layer, features to logits."""

        def piece(name: str, run: Callable[[Tensor, DecoderContext], Tensor], *modules: str) -> Segment[DecoderContext]:
            prefixes = tuple(f"{module}." for module in modules)
            return Segment(name, tuple(n for n, _ in self.named_parameters() if n.startswith(prefixes)), run)

        return [
            piece("embedding", lambda token_BS, _: self.embedding(token_BS), "embedding"),
            *(
                piece(f"layers.{index}", partial(self._layer, index), f"layers.{index}")
                for index in range(len(self.layers))
            ),
            piece("head", self._head, "norm", "head"),
        ]

    def _layer(self, index: int, x_BSD: Tensor, context: DecoderContext) -> Tensor:
        arguments = (x_BSD, context.info, context.rope, context.scale)
        x_BSD, statistics = run_unit(self.activations, f"layers.{index}", self.layers[index], *arguments)
        context.statistics.append(statistics)
        return x_BSD

    def _head(self, x_BSD: Tensor, context: DecoderContext) -> Tensor:
        x_BSD = self.norm(x_BSD)
        return F.linear(x_BSD, self.embedding.weight) if self.head is None else self.head(x_BSD)


def build_block(config: DecoderConfig, layer: int, parts: ModelParts) -> Block:
    """One layer from the configuration and the parts behind the seams."""
    attention = Attention(
        config.model_features,
        config.num_heads,
        config.num_kv_heads,
        config.head_features,
        parts.attention,
        qk_norm_eps=config.norm_eps if config.qk_norm else None,
        dtype=parts.dtype,
    )
    router = Router(
        config.num_experts, config.model_features, config.router, config.balance, layer=layer, dtype=parts.dtype
    )
    experts = GroupedExperts(
        config.num_experts // parts.expert_parallel,
        config.model_features,
        config.expert_features,
        activation=config.activation,
        backend=parts.grouped_gemm,
        dtype=parts.dtype,
    )
    moe = MoELayer(router, parts.dispatcher, experts)
    return Block(config.model_features, attention, moe, norm_eps=config.norm_eps, dtype=parts.dtype)


def decoder_init_rules(config: DecoderConfig) -> list[tuple[str, InitRule]]:
    """Initial values by global name."""
    std = config.init_std
    residual = normal(std / (2 * config.num_layers) ** 0.5)
    return [
        ("*norm.weight", ones()),
        ("*.o_proj.weight", residual),
        ("*.experts.w2_EFD", residual),
        ("*", normal(std)),
    ]
