"""Configuration of the kernels and of the router. Imports nothing heavy."""

from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Literal

GraphScope = Literal["attn", "moe_router", "moe_preprocess"]


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Which implementation computes what.

    Attributes:
        grouped_gemm: name of an installed grouped GEMM backend, or `auto`: the first of an ordered list that supports
            the dtype and the device.
        implementation: of everything else that has a Triton kernel: `plain` composes PyTorch's operators, `triton` runs
            the kernels, `auto` takes these for CUDA tensors of at most float32 where Triton is installed.
        graphs: what is captured in CUDA graphs and replayed: nothing (`none`), parts of each layer (`partial`), or the
            forward and backward of a step (`full`). On a CPU the same buffers are used, and the functions run again.
        graph_scopes: parts of a layer for `partial`: attention with its norms (`attn`), router and balance losses
            (`moe_router`), plan of the dispatch (`moe_preprocess`). What follows each other is one graph.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    grouped_gemm: str = "auto"
    implementation: Literal["auto", "plain", "triton"] = "auto"
    graphs: Literal["none", "partial", "full"] = "none"
    graph_scopes: tuple[GraphScope, ...] = ("attn", "moe_router")


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """How rotary positions are stretched beyond the context that a model was trained on (YaRN, arXiv 2309.00071).

    Attributes:
        factor: by which the context grows; 1 leaves positions as they are and the other options without effect.
        original_tokens: context before.
        beta_fast: pairs of features that turn more often than this in the original context keep their frequency.
        beta_slow: pairs that turn less often than this are slowed down by `factor`; a ramp lies between the two.
        mscale: rotated features are multiplied by (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1).
        mscale_all_dim: the scale of the softmax is multiplied by (0.1 mscale_all_dim ln(factor) + 1) squared.
        truncate: the ramp begins and ends at whole pairs.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    factor: float = 1.0
    original_tokens: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True

    def problems(self) -> list[tuple[str, str]]:
        """Every violated rule: (field, sentence)."""
        found = [
            (name, "A factor of YaRN must be finite and not below 0.")
            for name in ("mscale", "mscale_all_dim")
            if not (isfinite(getattr(self, name)) and getattr(self, name) >= 0)
        ]
        if not (isfinite(self.factor) and self.factor >= 1):
            found.append(("factor", "The context grows by a finite factor of at least 1; 1 leaves it as it is."))
        if self.original_tokens < 1:
            found.append(("original_tokens", "The original context has at least 1 token."))
        if not (isfinite(self.beta_fast) and self.beta_fast > self.beta_slow > 0):
            found.append(("beta_fast", f"It must be finite and above beta_slow = {self.beta_slow}, itself above 0."))
        return found


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How tokens choose experts and how much each choice weighs.

    Attributes:
        top_k: K, experts per token.
        score: what turns logits into scores.
        softmax_order: softmax over all experts and then the choice, or the choice and then softmax over the chosen.
        normalize: divide the chosen scores by their sum.
        scale: factor on every weight, also when they are not normalised.
        groups: the experts form this many groups of neighbours, of which only the best are open to a token; 1 for none.
        group_top_k: open groups per token.
        allow_constant_weight: accept K = 1 with a weight that is always `scale`, which gives the router no gradient
            from the language-model loss.
        jitter: in training, what the gate reads is multiplied by random numbers in [1 - jitter, 1 + jitter).
        sinkhorn_iterations: in training, experts are chosen by a transport plan that loads them evenly, found in as
            many iterations; 0 chooses by the scores. Weights come from the scores either way.
        force_balance: in training, every expert gets equally many choices, whatever the logits; for benchmarks.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    top_k: int = 2
    score: Literal["softmax", "sigmoid"] = "softmax"
    softmax_order: Literal["before_topk", "after_topk"] = "before_topk"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    group_top_k: int = 1
    allow_constant_weight: bool = False
    jitter: float = 0.0
    sinkhorn_iterations: int = 0
    force_balance: bool = False

    def problems(self, num_experts: int) -> list[tuple[str, str]]:
        """Every violated rule in a layer of `num_experts` experts: (field, sentence that names the legal values)."""
        found: list[tuple[str, str]] = []
        if not 1 <= self.top_k <= num_experts:
            found.append(("top_k", f"A token chooses between 1 and {num_experts} of {num_experts} experts."))
        if self.score == "sigmoid" and self.softmax_order == "after_topk":
            found.append(
                (
                    "softmax_order",
                    'There is no softmax to order when score is "sigmoid"; leave softmax_order at "before_topk".',
                )
            )
        constant = self.normalize or (self.score == "softmax" and self.softmax_order == "after_topk")
        if self.top_k == 1 and num_experts > 1 and constant and not self.allow_constant_weight:
            found.append(
                (
                    "top_k",
                    "The weight of a single choice is constant when it is normalised or comes from a softmax after "
                    "top-k, so the language-model loss would not train the router; use top_k of at least 2, or "
                    'normalize = false with softmax_order = "before_topk", or allow_constant_weight = true.',
                )
            )
        if not (isfinite(self.scale) and self.scale > 0):
            found.append(("scale", "The factor on the weights must be finite and above 0."))
        return found + self._training_problems() + self._group_problems(num_experts)

    def _training_problems(self) -> list[tuple[str, str]]:
        found = []
        if not 0 <= self.jitter < 1:
            found.append(("jitter", "It lies in [0, 1), where no input of the gate changes its sign; 0 for none."))
        if self.sinkhorn_iterations < 0:
            found.append(("sinkhorn_iterations", "The number of iterations is at least 0; 0 chooses by the scores."))
        elif self.sinkhorn_iterations and (self.groups > 1 or self.force_balance):
            other = "groups" if self.groups > 1 else "force_balance"
            rule = f"A transport plan chooses among all experts; set it to 0, or leave {other} at its default."
            found.append(("sinkhorn_iterations", rule))
        return found

    def _group_problems(self, num_experts: int) -> list[tuple[str, str]]:
        if self.groups < 1 or num_experts % self.groups:
            legal = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
            return [("groups", f"The number of groups must divide the {num_experts} experts: {legal}.")]
        if not 1 <= self.group_top_k <= self.groups:
            return [("group_top_k", f"Between 1 and {self.groups} of {self.groups} groups can be open to a token.")]
        found = []
        open_experts = self.group_top_k * (num_experts // self.groups)
        if self.groups > 1 and self.top_k > open_experts:
            found.append(
                (
                    "top_k",
                    f"A token can choose at most {open_experts} experts: {self.group_top_k} open groups of "
                    f"{num_experts // self.groups}.",
                )
            )
        if self.top_k % self.group_top_k:
            legal = ", ".join(str(n) for n in range(1, self.groups + 1) if self.top_k % n == 0)
            found.append(
                (
                    "group_top_k",
                    f"The number of open groups must divide top_k = {self.top_k}, because a group is judged by its "
                    f"top_k / group_top_k best scores: {legal}.",
                )
            )
        return found


@dataclass(frozen=True, kw_only=True)
class CapacityConfig:
    """How many choices an expert takes at most; a choice beyond adds nothing to its token, as if it were not made.

    Attributes:
        factor: the capacity is this times the choices per expert if all experts had equally many, rounded up, and at
            most one for each token; none limits nothing.
        policy: which choices an expert keeps, those of the largest weight (`probability`) or of the first tokens
            (`position`).
        min_capacity: the capacity is at least this, where there are so many tokens.
        scope: whose tokens compete, those of a `rank`, so that what is dropped depends on the layout, or of a
            `microbatch` on all ranks that share it, which exchange the weights of their choices.
        pad: every expert gets as many rows as its capacity, so that shapes do not depend on the choices.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    factor: float | None = None
    policy: Literal["probability", "position"] = "probability"
    min_capacity: int = 0
    scope: Literal["rank", "microbatch"] = "rank"
    pad: bool = False

    def problems(self) -> list[tuple[str, str]]:
        """Every violated rule: (field, sentence that names the legal values)."""
        found = []
        if self.factor is not None and not (isfinite(self.factor) and self.factor > 0):
            found.append(("factor", "The factor must be finite and above 0, or none, which limits nothing."))
        for name, legal in (("policy", ("probability", "position")), ("scope", ("rank", "microbatch"))):
            if getattr(self, name) not in legal:
                found.append((name, f"It must be one of {', '.join(legal)}."))
        if self.min_capacity < 0:
            found.append(("min_capacity", "It must be at least 0."))
        if self.factor is None:
            found += [
                (name, "It has no effect without a factor; set one, or leave this out.")
                for name in ("min_capacity", "pad")
                if getattr(self, name)
            ]
        return found
