"""The decoder: embedding, layers, norm, layers of multi-token prediction, output projection.

Shape legend: B sequences, S slots, T = B*S tokens, D model, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_kernels.losses import inject_gradient
from moe_kernels.norm import RMSNorm
from moe_kernels.rope import rope_tables
from moe_memory.recompute import ActivationPolicy, run_unit
from moe_parallel import SequenceInfo
from moe_parallel.pipeline.chunk import Segment
from moe_parallel.pipeline.layout import Stage
from moe_train.models.build import BuildBlock, build_block, build_mtp_layer
from moe_train.models.config import DecoderConfig
from moe_train.models.router import Router
from moe_train.models.spec import ModelParts
from moe_train.models.stages import has_norm, needs_embedding, needs_head
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
        statistics: of the routers so far.
        losses: further terms of the loss, with the weights of the step and without coefficient, detached.
        activations: what the layers' activations have in common.
    """

    info: SequenceInfo
    scale: MicrobatchScale | None
    rope: tuple[Tensor, Tensor]
    activations: AbstractContextManager[object] = field(default_factory=nullcontext)
    statistics: list[RouterStatistics] = field(default_factory=list)
    losses: dict[str, Tensor] = field(default_factory=dict)


class Head(nn.Module):
    """The output projection; the weight is [V, D], or where there is none that of the embedding."""

    weight: nn.Parameter | None

    def __init__(self, model_features: int, vocab_size: int, *, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        weight_VD = None if tied else nn.Parameter(torch.empty(vocab_size, model_features, dtype=dtype))
        self.register_parameter("weight", weight_VD)

    def forward(self, x_TD: Tensor, embedding_VD: Tensor | None) -> Tensor:
        """Logits [T, V]; the embedding is needed where there is no weight."""
        weight_VD = embedding_VD if self.weight is None else self.weight
        assert weight_VD is not None
        return F.linear(x_TD, weight_VD)


class Decoder(nn.Module):
    """A decoder-only Transformer; it knows no rank and no backend.

    Parameters are uninitialised, on the current default device. Input and output embedding are one parameter where the
    configuration ties them. Layers of multi-token prediction run in training only; their losses join the objective
    where they are computed.

    Args:
        block: makes a layer from the configuration, its number and the parts; called as `Block` is, it returns features
            and the statistics of its router, or None.
    """

    def __init__(
        self, config: DecoderConfig, vocab_size: int, parts: ModelParts, *, block: BuildBlock = build_block
    ) -> None:
        super().__init__()
        self.config = config
        self.dtype = parts.dtype
        self.activations: ActivationPolicy = parts.activations
        self.cross_entropy = parts.cross_entropy
        self.embedding = nn.Embedding(vocab_size, config.model_features, dtype=parts.dtype)
        self.layers = nn.ModuleList(block(config, layer, parts) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.model_features, config.norm_eps, dtype=parts.dtype)
        self.mtp = nn.ModuleList(
            build_mtp_layer(config, depth, parts, block=block) for depth in range(config.mtp_layers)
        )
        self.head = Head(config.model_features, vocab_size, tied=config.tied_embeddings, dtype=parts.dtype)

    @property
    def depths(self) -> int:
        """Tokens that are predicted beyond the next one."""
        return self.config.mtp_layers

    @property
    def features(self) -> int:
        """Features of a token between two stages of a pipeline."""
        return self.config.model_features

    def keep(self, stages: Sequence[Stage]) -> None:
        """Drop what these stages of a pipeline do not need; names stay those of the whole model."""
        layers = {layer for stage in stages for layer in stage.layers}
        depths = {depth for stage in stages for depth in stage.mtp_depths}
        for modules, kept in ((self.layers, layers), (self.mtp, depths)):
            for name in [name for name, _ in modules.named_children() if int(name) not in kept]:
                delattr(modules, name)
        if not any(map(needs_head, stages)):
            del self.head
        elif self.head.weight is None and not any(stage.has_embedding for stage in stages):
            # No token is looked up here, or in training alone (multi-token prediction), so that the table is read by
            # another module than its own, which has to wait for it.
            self.head.weight = self.embedding.get_parameter("weight")
        if not any(needs_embedding(self.config, stage) for stage in stages):
            del self.embedding
        if not any(has_norm(self.config, stage) for stage in stages):
            del self.norm

    def routers(self) -> Sequence[Router]:
        """Of all layers that have one, in the order of their statistics in training."""
        return [module for module in self.modules() if isinstance(module, Router)]

    def forward(self, token_BS: Tensor, info: SequenceInfo, scale: MicrobatchScale | None = None) -> DecoderOutput:
        """Run the model on an execution microbatch; `scale` attaches the balance losses (training only)."""
        context, x = self.context(info, scale), token_BS
        for segment in self.segments():
            x = segment.run(x, context)
        logits_BSV = x.view(*info.position_BS.shape, -1)
        return DecoderOutput(logits_BSV=logits_BSV, statistics=RouterStatistics.stack(context.statistics))

    def context(self, info: SequenceInfo, scale: MicrobatchScale | None) -> DecoderContext:
        """What the segments of one forward need besides their input."""
        config = self.config
        rope = rope_tables(info.position_BS, config.rotary_features, config.rope_base, self.dtype, config.yarn)
        return DecoderContext(info=info, scale=scale, rope=rope, activations=self.activations.forward())

    def segments(self, stage: Stage | None = None) -> list[Segment[DecoderContext]]:
        """The forward in pieces: tokens to features, each layer, the norm, each depth of prediction, the logits.

        Those of one stage of a pipeline, or of the whole model.
        """
        stage = stage or Stage(
            layers=range(self.config.num_layers), mtp_depths=range(self.depths), has_embedding=True, has_loss=True
        )

        def embed(token_BS: Tensor, _: DecoderContext) -> Tensor:
            features_TD: Tensor = self.embedding(token_BS.flatten())
            return features_TD

        def piece(name: str, run: Callable[[Tensor, DecoderContext], Tensor], *modules: str) -> Segment[DecoderContext]:
            prefixes = tuple(f"{module}." for module in modules)
            return Segment(name, tuple(n for n, _ in self.named_parameters() if n.startswith(prefixes)), run)

        # A parameter that several segments use belongs to the first of them.
        found = [piece("embedding", embed, "embedding")] if stage.has_embedding else []
        found += [piece(f"layers.{i}", partial(self._layer, i), f"layers.{i}") for i in stage.layers]
        if has_norm(self.config, stage):
            found.append(piece("norm", lambda x_TD, _: self.norm(x_TD), "norm"))
        found += [
            piece(f"mtp.{d}", partial(self._predict, d), f"mtp.{d}", "head", "embedding") for d in stage.mtp_depths
        ]
        if stage.has_loss:
            found.append(piece("head", lambda x_TD, _: self._head(x_TD), "head", "embedding"))
        seen: set[str] = set()
        for place, segment in enumerate(found):
            found[place] = replace(segment, parameters=tuple(n for n in segment.parameters if n not in seen))
            seen |= set(segment.parameters)
        return found

    def _layer(self, index: int, x_TD: Tensor, context: DecoderContext) -> Tensor:
        scale = None if context.scale is None else context.scale.routing
        arguments = (x_TD, context.info, context.rope, scale)
        layer = self.layers.get_submodule(str(index))
        with context.activations:
            x_TD, statistics = run_unit(self.activations, f"layers.{index}", layer, *arguments)
        if statistics is not None:
            context.statistics.append(statistics)
        return x_TD

    def _predict(self, depth: int, x: Tensor, context: DecoderContext) -> Tensor:
        """One depth of multi-token prediction: the model's features to themselves, with its loss attached.

        Between two depths x is [T, 2D], the model's features and those of the depth before side by side.
        """
        if context.scale is None:
            return x
        features = x.shape[-1] // min(depth + 1, 2)
        x_TD, h_TD = x[..., :features], x[..., -features:]
        target = context.scale.ahead[depth]
        e_TD = self.embedding(target.ahead.token_BS.flatten())
        arguments = (h_TD, e_TD, context.info, context.rope, context.scale.routing)
        layer = self.mtp.get_submodule(str(depth))
        with context.activations:
            h_TD, statistics = run_unit(self.activations, f"mtp.{depth}", layer, *arguments)
        if statistics is not None:
            context.statistics.append(statistics)
        loss_T = self.cross_entropy(
            self._head(h_TD), target.ahead.target_BS.flatten(), target.ahead.target_mask_BS.flatten()
        )
        loss = (loss_T * target.target_weight_T).sum() / self.depths
        context.losses["mtp"] = context.losses.get("mtp", 0) + loss.detach()
        y = x_TD if depth + 1 == self.depths else torch.cat((x_TD, h_TD), -1)
        return inject_gradient(y, loss, self.config.mtp_weight)

    def _head(self, x_TD: Tensor) -> Tensor:
        logits_TV: Tensor = self.head(x_TD, None if self.head.weight is not None else self.embedding.weight)
        return logits_TV
