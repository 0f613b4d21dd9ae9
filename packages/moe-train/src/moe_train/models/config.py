"""Configuration of the decoder family. Imports nothing heavy."""

from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar, Literal

from moe_kernels.config import RouterConfig
from moe_parallel.problem import Problem


@dataclass(frozen=True, kw_only=True)
class BalanceConfig:
    """Coefficients of the losses that keep experts balanced (numerics §2). A coefficient of 0 leaves the loss out.

    Attributes:
        aux: of the loss per balance microbatch.
        seq: of the loss per sequence.
        glob: of the loss over the global batch, against the expert load of the previous optimizer step.
        z: of the mean squared log-partition of the router logits.
        routing: whose choices the load statistics count: `plain`, the top-k of the scores, or `routed`, the real
            selection with bias and groups.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    aux: float = 0.0
    seq: float = 0.0
    glob: float = 0.0
    z: float = 0.0
    routing: Literal["plain", "routed"] = "plain"

    def problems(self) -> list[Problem]:
        """Every violated rule."""
        return [
            Problem(key=f"model.balance.{name}", value=value, rule="a loss coefficient must be finite and not below 0")
            for name, value in vars(self).items()
            if isinstance(value, float) and not (isfinite(value) and value >= 0)
        ]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder-only Transformer whose feed-forward layers are Mixtures of Experts.

    Grouped-query attention with rotary positions, RMSNorm before each part, no biases.

    Attributes:
        num_layers: Transformer layers.
        model_features: width D of the residual stream.
        num_heads: query heads.
        num_kv_heads: key/value heads; divides `num_heads`.
        head_features: width of one head, even; independent of D.
        num_experts: E, experts of each layer.
        expert_features: inner width F of one expert.
        router: how tokens choose experts.
        balance: losses that keep experts balanced.
        activation: gate of the experts.
        qk_norm: normalise each query and key head by RMSNorm before the rotation, as Qwen3 does.
        rope_base: base of the rotary frequencies.
        norm_eps: epsilon of RMSNorm.
        tied_embeddings: the output projection is the input embedding.
        init_std: standard deviation of initial weights; projections into the residual stream are scaled by
            1 / sqrt(2 num_layers).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["decoder"] = "decoder"
    num_layers: int = 4
    model_features: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_features: int = 32
    num_experts: int = 8
    expert_features: int = 128
    router: RouterConfig = field(default_factory=RouterConfig)
    balance: BalanceConfig = field(default_factory=BalanceConfig)
    activation: Literal["silu", "gelu"] = "silu"
    qk_norm: bool = True
    rope_base: float = 10_000.0
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    init_std: float = 0.02

    def problems(self) -> list[Problem]:
        """Every violated rule, of this section and of the sections inside it."""
        found = [
            Problem(key=f"model.{name}", value=value, rule="must be at least 1")
            for name, value in vars(self).items()
            if isinstance(value, int) and not isinstance(value, bool) and value < 1
        ]
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
        if self.head_features % 2:
            found.append(
                Problem(
                    key="model.head_features",
                    value=self.head_features,
                    rule="must be even, because rotary positions turn pairs of features",
                )
            )
        for name in ("rope_base", "norm_eps", "init_std"):
            value = getattr(self, name)
            if not (isfinite(value) and value > 0):
                found.append(Problem(key=f"model.{name}", value=value, rule="must be finite and above 0"))
        if self.num_experts >= 1:
            found += [
                Problem(key=f"model.router.{name}", value=getattr(self.router, name), rule=rule)
                for name, rule in self.router.problems(self.num_experts)
            ]
        return found + self.balance.problems()
