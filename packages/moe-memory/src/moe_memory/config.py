"""The `memory` and `optim` sections of the configuration. Imports nothing heavy."""

from dataclasses import dataclass
from math import isfinite
from typing import Any, ClassVar, Literal

from moe_parallel.problem import Problem


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What lives where, and in which precision.

    Attributes:
        data_parallel: the engine that owns gradients, master weights and optimizer state. `zero1` shards state over the
            replicas and keeps whole weights on every rank; `fsdp` shards weights too and communicates more.
        compute_dtype: dtype of weights and activations; master weights are at least float32.
        recompute: `full` keeps only the input of each layer and runs its forward again in the backward pass.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    data_parallel: Literal["zero1", "fsdp"] = "zero1"
    compute_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    recompute: Literal["none", "full"] = "none"

    def problems(self) -> list[Problem]:
        """Every violated rule; the types say it all."""
        return []


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (arXiv 1711.05101) and its learning-rate schedule.

    Attributes:
        lr: largest learning rate.
        schedule: after the warm-up, `cosine` falls to `min_lr_fraction * lr` at the last step, `constant` stays.
        warmup_steps: updates over which the rate rises linearly to `lr`.
        min_lr_fraction: end of the cosine as a share of `lr`.
        beta1, beta2: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of matrices, times the learning rate.
        max_grad_norm: gradients are scaled down to this global L2 norm; None leaves them.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    lr: float = 3e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 20
    min_lr_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0

    def problems(self) -> list[Problem]:
        """Every violated rule."""
        positive = "must be finite and above 0"
        rules = [
            ("lr", isfinite(self.lr) and self.lr > 0, positive),
            ("warmup_steps", self.warmup_steps >= 0, "must not be below 0"),
            ("min_lr_fraction", 0 <= self.min_lr_fraction <= 1, "must lie between 0 and 1"),
            ("beta1", 0 <= self.beta1 < 1, "must be at least 0 and below 1"),
            ("beta2", 0 <= self.beta2 < 1, "must be at least 0 and below 1"),
            ("eps", isfinite(self.eps) and self.eps > 0, positive),
            ("weight_decay", isfinite(self.weight_decay) and self.weight_decay >= 0, "must be finite and not below 0"),
            (
                "max_grad_norm",
                self.max_grad_norm is None or (isfinite(self.max_grad_norm) and self.max_grad_norm > 0),
                positive + ", or none",
            ),
        ]
        return [
            Problem(key=f"optim.{name}", value=getattr(self, name), rule=rule)
            for name, holds, rule in rules
            if not holds
        ]
