"""Configuration of the decoder, of which every family is a table of values. Imports nothing heavy."""

from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar, Literal

from moe_kernels.config import CapacityConfig, RouterConfig, YarnConfig
from moe_parallel.problem import Problem


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """What keeps experts balanced (numerics §2 and §3). A coefficient of 0 leaves a loss out.

    Attributes:
        aux: of the loss per balance microbatch.
        seq: of the loss per sequence.
        glob: of the loss over the global batch, against the expert load of the previous optimizer step.
        z: of the mean squared log-partition of the router logits.
        routing: whose choices the load statistics count: `plain`, the top-k of the scores, or `routed`, the real
            selection with bias and groups.
        bias_rate: how much the expert bias changes in a step; 0 keeps it as it is, none leaves it out.
        bias_recentred: keep the mean of the expert bias at 0.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    aux: float = 0.0
    seq: float = 0.0
    glob: float = 0.0
    z: float = 0.0
    routing: Literal["plain", "routed"] = "plain"
    bias_rate: float | None = None
    bias_recentred: bool = False

    def problems(self) -> list[Problem]:
        """Every violated rule."""
        return [
            Problem(key=f"model.balance.{name}", value=value, rule="must be finite and not below 0")
            for name, value in vars(self).items()
            if isinstance(value, float) and not (isfinite(value) and value >= 0)
        ]


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Widths of multi-head latent attention (arXiv 2405.04434), where `attention` is `latent`.

    Keys and values of a token are stored as one vector; a query or key head has `head_features` features without
    rotation and `rotary_features` with it, which all heads of the keys share.

    Attributes:
        kv_features: of the vector from which keys and values are made.
        query_features: of the vector from which queries are made; none makes them from the residual stream.
        rotary_features: of a query or key head that are rotated, even.
        value_features: of a value head.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kv_features: int = 64
    query_features: int | None = None
    rotary_features: int = 16
    value_features: int = 32

    def problems(self) -> list[Problem]:
        """Every violated rule."""
        found = _below_one("model.latent", self)
        if self.rotary_features % 2:
            found.append(_odd("model.latent.rotary_features", self.rotary_features))
        return found


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only Transformer with Mixtures of Experts.

    Rotary positions, RMSNorm before each part, no biases but those of `qkv_bias`. The public families are values of
    these options; `moe_train.hf` reads them from a `config.json`.

    Attributes:
        kind: an installed family of models (`moe-train plugins`); the other options are those of the family.
        num_layers: Transformer layers.
        model_features: width D of the residual stream.
        attention: `grouped`: query heads share key/value heads; `latent`: multi-head latent attention.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`, and equals it where attention is latent.
        head_features: width of one head, even; of a query or key head without its rotated features where attention is
            latent. Independent of D.
        latent: further widths where attention is latent.
        qk_norm: RMSNorm of queries and keys before the rotation: of each `head` (Qwen3), of `all` features of a token
            together (OLMoE), or `none`. Where attention is latent it is `none`, and the latent vectors are normalised.
        qkv_bias: query, key and value projections have a bias (Qwen2).
        sliding_window: tokens that a token sees, itself included; none is all before it.
        full_attention_layers: numbers of layers that see all tokens in spite of `sliding_window`.
        num_experts: E, experts of each layer.
        expert_features: inner width F of one expert.
        dense_layers: numbers of layers with one feed-forward network in place of experts.
        dense_features: its inner width; needed where there are such layers.
        shared_features: inner width of the shared expert, which every token meets; none leaves it out.
        shared_gate: weigh the shared expert by a sigmoid of a projection of the token (Qwen2-MoE).
        moe_latent_features: width at which routed experts work, between a projection down before dispatch and one up
            after combine; none is D. The router and the shared expert stay at D.
        router: how tokens choose experts.
        balance: what keeps experts balanced.
        capacity: how many choices an expert takes at most, in training and evaluation. Over a `microbatch` the ranks of
            `tp` and `cp` share it, and the loss does not depend on how many they are.
        activation: gate of the experts.
        rope_base: base of the rotary frequencies.
        yarn: how positions are stretched beyond the context that a model was trained on.
        norm_eps: epsilon of RMSNorm.
        tied_embeddings: the output projection is the input embedding.
        mtp_layers: D, tokens that are predicted beyond the next one, each by a layer of its own, in training.
        mtp_weight: of the mean of their losses.
        init_std: standard deviation of initial weights; projections into the residual stream are scaled by
            1 / sqrt(2 num_layers).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["decoder"] = "decoder"
    num_layers: int = 4
    model_features: int = 128
    attention: Literal["grouped", "latent"] = "grouped"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_features: int = 32
    latent: LatentConfig = field(default_factory=LatentConfig)
    qk_norm: Literal["none", "head", "all"] = "head"
    qkv_bias: bool = False
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()
    num_experts: int = 8
    expert_features: int = 128
    dense_layers: tuple[int, ...] = ()
    dense_features: int | None = None
    shared_features: int | None = None
    shared_gate: bool = False
    moe_latent_features: int | None = None
    router: RouterConfig = field(default_factory=RouterConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    activation: Literal["silu", "gelu"] = "silu"
    rope_base: float = 10_000.0
    yarn: YarnConfig = field(default_factory=YarnConfig)
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    mtp_layers: int = 0
    mtp_weight: float = 0.1
    init_std: float = 0.02

    @property
    def rotary_features(self) -> int:
        """Features of a head that are rotated."""
        return self.latent.rotary_features if self.attention == "latent" else self.head_features

    def is_dense(self, layer: int) -> bool:
        """Whether a layer has one feed-forward network in place of experts; none of multi-token prediction has."""
        return layer in self.dense_layers

    def window(self, layer: int) -> int | None:
        """Tokens that a token sees in a layer; None is all before it."""
        return None if layer in self.full_attention_layers else self.sliding_window

    def problems(self) -> list[Problem]:
        """Every violated rule, of this section and of the sections inside it."""
        found = _below_one("model", self, but=("mtp_layers",))
        if self.mtp_layers < 0:
            found.append(Problem(key="model.mtp_layers", value=self.mtp_layers, rule="must be at least 0"))
        for name in ("rope_base", "norm_eps", "init_std", "mtp_weight"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                found.append(Problem(key=f"model.{name}", value=value, rule="must be finite and above 0"))
        if self.num_experts >= 1:
            found += [
                Problem(key=f"model.router.{name}", value=getattr(self.router, name), rule=rule)
                for name, rule in self.router.problems(self.num_experts)
            ]
        found += [
            Problem(key=f"model.yarn.{name}", value=getattr(self.yarn, name), rule=rule)
            for name, rule in self.yarn.problems()
        ]
        found += [
            Problem(key=f"model.capacity.{name}", value=getattr(self.capacity, name), rule=rule)
            for name, rule in self.capacity.problems()
        ]
        if self.capacity.pad:
            rule = "would need a dispatcher that gives every expert as many rows as its capacity"
            found.append(Problem(key="model.capacity.pad", value=True, rule=rule, legal="false"))
        return [
            *found,
            *self._attention_problems(),
            *self._layer_problems(),
            *self.latent.problems(),
            *self.balance.problems(),
        ]

    def _attention_problems(self) -> list[Problem]:
        found = []
        if self.num_kv_heads >= 1 and self.num_heads >= 1 and self.num_heads % self.num_kv_heads:
            legal = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            found.append(
                Problem(
                    key="model.num_kv_heads",
                    value=self.num_kv_heads,
                    rule=f"must divide model.num_heads = {self.num_heads}",
                    legal=", ".join(map(str, legal)),
                )
            )
        if self.attention == "grouped":
            if self.head_features % 2:
                found.append(_odd("model.head_features", self.head_features))
            return found
        rules = {
            "num_kv_heads": (self.num_kv_heads != self.num_heads, str(self.num_heads), "has as many of them as heads"),
            "qk_norm": (self.qk_norm != "none", "none", "normalises latent vectors in place of heads"),
            "qkv_bias": (self.qkv_bias, "false", "has projections without bias"),
        }
        return found + [
            Problem(key=f"model.{name}", value=getattr(self, name), rule=f"attention = 'latent' {rule}", legal=legal)
            for name, (wrong, legal, rule) in rules.items()
            if wrong
        ]

    def _layer_problems(self) -> list[Problem]:
        found = []
        for name in ("dense_layers", "full_attention_layers"):
            layers = getattr(self, name)
            if len(set(layers)) < len(layers) or not all(0 <= layer < self.num_layers for layer in layers):
                rule = f"names different layers, which are numbered from 0 to {self.num_layers - 1}"
                found.append(Problem(key=f"model.{name}", value=layers, rule=rule))
        if not found and len(self.dense_layers) == self.num_layers:
            found.append(
                Problem(key="model.dense_layers", value=self.dense_layers, rule="leaves no layer with experts")
            )
        needs = {
            "dense_features": (self.dense_layers, "dense_layers"),
            "full_attention_layers": (self.sliding_window, "sliding_window"),
            "shared_gate": (self.shared_features, "shared_features"),
        }
        for name, (needed, other) in needs.items():
            if getattr(self, name) and not needed:
                rule = f"has no effect without model.{other}"
                found.append(Problem(key=f"model.{name}", value=getattr(self, name), rule=rule))
        if self.dense_layers and self.dense_features is None:
            rule = "is the inner width of model.dense_layers, and must be set with them"
            found.append(Problem(key="model.dense_features", value=None, rule=rule, legal="at least 1"))
        if self.router.sinkhorn_iterations:
            rule = "balances what model.router.sinkhorn_iterations balances already"
            used = {name: getattr(self.balance, name) > 0 for name in ("aux", "seq", "glob")}
            found += [
                Problem(key=f"model.balance.{name}", value=getattr(self.balance, name), rule=rule, legal=legal)
                for name, legal in {**dict.fromkeys(used, "0"), "bias_rate": "none"}.items()
                if used.get(name, self.balance.bias_rate is not None)
            ]
        if self.balance.bias_recentred and not self.balance.bias_rate:
            rule = "has no effect without model.balance.bias_rate"
            found.append(Problem(key="model.balance.bias_recentred", value=True, rule=rule))
        return found


def _below_one(section: str, config: object, but: tuple[str, ...] = ()) -> list[Problem]:
    return [
        Problem(key=f"{section}.{name}", value=value, rule="must be at least 1")
        for name, value in vars(config).items()
        if isinstance(value, int) and not isinstance(value, bool) and value < 1 and name not in but
    ]


def _odd(key: str, value: int) -> Problem:
    return Problem(key=key, value=value, rule="must be even, because rotary positions turn pairs of features")
