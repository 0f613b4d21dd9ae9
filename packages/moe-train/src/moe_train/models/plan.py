"""How the decoder is spread over ranks: which parameters are split, and where tokens change hands."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from moe_kernels import internal_dtype
from moe_kernels.norm import RMSNorm
from moe_parallel import (
    Boundary,
    Groups,
    ModuleRule,
    ParallelConfig,
    ParallelPlan,
    ParameterKind,
    PlanRule,
    SharedPieces,
    SplitVocabulary,
    sum_everywhere,
)
from moe_parallel.plan import part_of
from moe_parallel.tensor import Transition
from moe_train.errors import MoeTrainError
from moe_train.models.config import DecoderConfig

# Whole on every rank of `tp`, each of which sees other tokens, or makes other heads of it.
_summed = partial(PlanRule, grad_sum_axes=("tp",))


@dataclass(frozen=True, kw_only=True)
class _Ways:
    """How tokens enter and leave parts whose features are split.

    With sequence parallelism tokens are split over `tp` outside such parts, and what is outside sees a part of them.
    """

    enter: Transition
    leave: Transition
    outside: "partial[PlanRule] | type[PlanRule]"

    @classmethod
    def of(cls, parallel: ParallelConfig) -> "_Ways":
        if parallel.sequence_parallel:
            return cls(enter="gather_rows", leave="sum_scatter_rows", outside=_summed)
        return cls(enter="sum_gradients", leave="sum_outputs", outside=PlanRule)


def decoder_plan(
    config: DecoderConfig, parallel: ParallelConfig, norms: Sequence[str] = ("attention_norm", "moe_norm")
) -> ParallelPlan:
    """The plan of the decoder, or of another with parts of it that has these norms in its layers.

    Attention is split by heads, feed-forward parts by inner features, embedding and output projection by vocabulary,
    experts by number (`ep`) and inner features (`etp`). Into the Mixture of Experts tokens go split over `tp` anyway.
    """
    ways = _Ways.of(parallel)
    attention = _latent_attention(config, ways) if config.attention == "latent" else _attention(config, parallel, ways)
    parts = [_edges(config, ways, norms), attention, _dense(config, ways), _moe(config, parallel)]
    return ParallelPlan(
        parameters=tuple(rule for part in parts for rule in part.parameters),
        modules=tuple(rule for part in parts for rule in part.modules),
    )


def _edges(config: DecoderConfig, ways: _Ways, norms: Sequence[str]) -> ParallelPlan:
    """Embedding, norms of the residual stream, multi-token prediction, output projection."""
    shared = {"embedding.weight": "pp_embedding", "head.weight": "pp_head"}
    if config.tied_embeddings:
        del shared["head.weight"]
    outside = ["norm.weight", *(f"layers.*.{norm}.weight" for norm in norms)]
    if config.dense_layers:
        outside.append("layers.*.mlp_norm.weight")
    if config.mtp_layers:
        outside += [f"mtp.*.block.{norm}.weight" for norm in norms]
        outside += [f"mtp.*.{name}.weight" for name in ("embedding_norm", "hidden_norm", "projection")]
        outside += [f"mtp.{depth}.norm.weight" for depth in range(config.mtp_layers)]
    return ParallelPlan(
        parameters=(
            *(
                PlanRule(pattern=name, placements=(("tp", 0),), uneven=True, grad_sum_axes=(axis,))
                for name, axis in shared.items()
            ),
            *(ways.outside(pattern=name) for name in outside),
        ),
        modules=(
            ModuleRule(pattern="embedding", style=SplitVocabulary()),
            ModuleRule(pattern="embedding", style=Boundary(outputs=(ways.leave,))),
            ModuleRule(pattern="head", style=Boundary(inputs=(ways.enter,))),
        ),
    )


def _attention(config: DecoderConfig, parallel: ParallelConfig, ways: _Ways) -> ParallelPlan:
    """Heads are split; key/value heads that are fewer than ranks are held by all, and each makes the one it reads."""
    kv_split = config.num_kv_heads % parallel.tp == 0
    split = partial(PlanRule, placements=(("tp", 0),))
    rules = [PlanRule(pattern="*.attention.o_proj.weight", placements=(("tp", 1),))]
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        rules.append(split(pattern=f"*.attention.q_proj.{kind}"))
        rules += [(split if kv_split else _summed)(pattern=f"*.attention.{name}_proj.{kind}") for name in "kv"]
    modules = [
        ModuleRule(pattern="*.attention", style=Boundary(inputs=(ways.enter,))),
        ModuleRule(pattern="*.attention.o_proj", style=Boundary(outputs=(ways.leave,))),
    ]
    pieces = None if kv_split else config.num_kv_heads
    if pieces is not None:
        style = SharedPieces(pieces=pieces)
        modules += [ModuleRule(pattern=f"*.attention.{name}_proj", style=style) for name in "kv"]
    if config.qk_norm == "head":
        rules += [_summed(pattern=f"*.attention.{name}_norm.weight") for name in "qk"]
    if config.qk_norm == "all":
        rules.append(split(pattern="*.attention.q_norm.weight"))
        rules.append((split if kv_split else _summed)(pattern="*.attention.k_norm.weight"))
        modules.append(ModuleRule(pattern="*.attention.q_norm", style=SplitNorm()))
        modules.append(ModuleRule(pattern="*.attention.k_norm", style=SplitNorm(pieces=pieces)))
    return ParallelPlan(parameters=tuple(rules), modules=tuple(modules))


def _latent_attention(config: DecoderConfig, ways: _Ways) -> ParallelPlan:
    """Heads are split; the latent vectors are not, and tokens enter by them, because they are small."""
    has_query_latent = config.latent.query_features is not None
    query = "q_up_proj" if has_query_latent else "q_proj"
    downs = ["kv_down_proj", *(["q_down_proj"] if has_query_latent else [])]
    norms = ["kv_norm", *(["q_norm"] if has_query_latent else [])]
    entering = [ModuleRule(pattern=f"*.attention.{name}", style=Boundary(outputs=(ways.enter,))) for name in downs]
    if not has_query_latent:
        entering.append(ModuleRule(pattern="*.attention.q_proj", style=Boundary(inputs=(ways.enter,))))
    return ParallelPlan(
        parameters=(
            *(PlanRule(pattern=f"*.attention.{n}.weight", placements=(("tp", 0),)) for n in (query, "kv_up_proj")),
            PlanRule(pattern="*.attention.o_proj.weight", placements=(("tp", 1),)),
            *(ways.outside(pattern=f"*.attention.{name}.weight") for name in downs),
            *(_summed(pattern=f"*.attention.{name}.weight") for name in norms),
        ),
        modules=(*entering, ModuleRule(pattern="*.attention.o_proj", style=Boundary(outputs=(ways.leave,)))),
    )


def _mlp_rules(prefix: str) -> tuple[PlanRule, PlanRule]:
    return (
        PlanRule(pattern=f"{prefix}.gate_up_proj.weight", placements=(("tp", 1),)),
        PlanRule(pattern=f"{prefix}.down_proj.weight", placements=(("tp", 1),)),
    )


def _dense(config: DecoderConfig, ways: _Ways) -> ParallelPlan:
    """Feed-forward networks of layers without experts."""
    style = Boundary(inputs=(ways.enter,), outputs=(ways.leave,))
    names = [f"layers.{layer}.mlp" for layer in config.dense_layers]
    return ParallelPlan(
        parameters=tuple(rule for name in names for rule in _mlp_rules(name)),
        modules=tuple(ModuleRule(pattern=name, style=style) for name in names),
    )


def _moe(config: DecoderConfig, parallel: ParallelConfig) -> ParallelPlan:
    expert = partial(PlanRule, kind=ParameterKind.EXPERT)
    rules = [
        _summed(pattern="*.router.weight"),
        expert(pattern="*.experts.w1_ED2F", placements=(("ep", 0), ("etp", 3))),
        expert(pattern="*.experts.w2_EFD", placements=(("ep", 0), ("etp", 1))),
    ]
    # Tokens and which of them are valid, to outputs beside what the router reports.
    boundary = Boundary(inputs=("split_rows", "split_rows"), outputs=("join_rows", None))
    if parallel.sequence_parallel:
        boundary = Boundary(inputs=(None, "split_rows"))
    modules = [ModuleRule(pattern="*.moe", style=boundary)]
    if config.moe_latent_features is not None:
        rules += [_summed(pattern=f"*.moe.latent_{name}.weight") for name in ("down", "up")]
    if config.shared_features is not None:
        rules += _mlp_rules("*.moe.shared.mlp")
        style = Boundary(inputs=("gather_rows",), outputs=("sum_scatter_rows",))
        modules.append(ModuleRule(pattern="*.moe.shared.mlp", style=style))
        if config.shared_gate:
            rules.append(_summed(pattern="*.moe.shared.gate.weight"))
    return ParallelPlan(parameters=tuple(rules), modules=tuple(modules))


@dataclass(frozen=True, kw_only=True)
class SplitNorm:
    """An `RMSNorm` of which every rank of `tp` has some of the features.

    Attributes:
        pieces: of features, where several ranks have the same; each of them holds the whole weight then.
    """

    pieces: int | None = None

    def __call__(self, module: nn.Module, groups: Groups) -> nn.Module:
        if not isinstance(module, RMSNorm):
            raise MoeTrainError(f"the plan splits the features of an RMSNorm, not of {type(module).__name__}")
        ranks = groups.size("tp")
        if ranks == 1:
            return module
        pieces = self.pieces or ranks
        start, stop = part_of(module.weight.shape[0], pieces, groups.rank("tp") * pieces // ranks)
        held = None if self.pieces is None else slice(start, stop)
        return _SplitRMSNorm(module.weight, module.eps, (stop - start) * ranks, held, groups)


class _SplitRMSNorm(nn.Module):
    """`rms_norm` of features that are spread over ranks, one number of each token communicated in each direction.

    Args:
        features: over all ranks, those that several have counted as often. So the mean is right, and as every rank has
            the gradient of what it makes of its features, so is the sum of them.
        held: of the weight, what belongs to this rank's features; None is all.
    """

    def __init__(self, weight: Tensor, eps: float, features: int, held: slice | None, groups: Groups) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self._features = features
        self._held = held
        self._group = groups.group("tp")

    def forward(self, x_TF: Tensor) -> Tensor:
        internal = internal_dtype(x_TF.dtype)
        weight_F = self.weight if self._held is None else self.weight[self._held]
        row_TF = x_TF.to(internal)
        square_T1 = sum_everywhere(row_TF.square().sum(-1, keepdim=True), self._group)
        scale_T1 = torch.rsqrt(square_T1 / self._features + self.eps)
        return (row_TF * scale_T1 * weight_F.to(internal)).to(x_TF.dtype)
