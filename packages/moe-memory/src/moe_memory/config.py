"""The `memory` and `optim` sections of the configuration. Imports nothing heavy."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from math import isfinite
from typing import Any, ClassVar, Literal

from moe_memory.options import check_words
from moe_memory.unit_choice import OFFLOAD_UNITS, RECOMPUTE_UNITS, entries_of, entry_problems
from moe_parallel.problem import Problem

Reshard = Literal["forward", "backward", "step"]


@dataclass(frozen=True, kw_only=True)
class ReshardConfig:
    """When `fsdp` cuts weights again that it has gathered: after every `forward`, so that the backward gathers them
    anew; after the `backward` of a microbatch; or at the end of the `step`, which gathers once whatever the number of
    microbatches, as pipelines want.

    Attributes:
        dense: of what is not experts.
        expert: of experts.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    dense: Reshard = "forward"
    expert: Reshard = "forward"

    def __post_init__(self) -> None:
        check_words("memory.reshard", self)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What lives where, and in which precision.

    Attributes:
        data_parallel: the engine that owns gradients, master weights and optimizer state. `zero1` shards state over the
            replicas and keeps whole weights on every rank; `fsdp` shards weights too and communicates more.
        bucket_mib: gradients that `zero1` sends at once, in MiB; see `ShardedEngine`.
        shard_replicas: state, and with `fsdp` weights, are sharded over runs of so many neighbouring replicas, and
            every run has all of it; none shards over all.
        reshard: when `fsdp` cuts weights again.
        prefetch_units: of `fsdp`, so many units are gathered ahead of the one whose forward runs.
        compute_dtype: dtype of weights and activations; `optim.master_dtype` is that of master weights.
        recompute: `full` keeps only the input of each layer and runs its forward again in the backward pass. A list
            names units that do so alone, in all layers or as `unit@pattern` in those of matching names
            (`moe_memory.unit_choice`): `layernorm`, `mla_up_proj`, `moe_act`, `core_attn`, `mlp`, `moe`,
            `shared_experts`, `full`.
        offload: modules whose input waits for its backward in host memory, also as `unit@pattern`: `attn_norm`,
            `qkv_linear`, `core_attn`, `attn_proj`, `mlp_norm`, `expert_fc1`, `moe_act`.
        offload_fraction: of their layers, evenly spread.
        offload_min_elements: smaller tensors stay.
        offload_keep_layers: so many of the latest layers of a stage stay, since their backward may follow at once.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    data_parallel: Literal["zero1", "fsdp"] = "zero1"
    bucket_mib: float = 64.0
    shard_replicas: int | None = None
    reshard: ReshardConfig = field(default_factory=ReshardConfig)
    prefetch_units: int = 0
    compute_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    recompute: Literal["none", "full"] | tuple[str, ...] = "none"
    offload: tuple[str, ...] = ()
    offload_fraction: float = 1.0
    offload_min_elements: int = 2**20
    offload_keep_layers: int = 1

    def __post_init__(self) -> None:
        check_words("memory", self)

    def with_engine(self, engine: Literal["zero1", "fsdp"]) -> "MemoryConfig":
        """The same for an engine, without what only the other one does."""
        if engine == "fsdp":
            return replace(self, data_parallel=engine)
        return replace(self, data_parallel=engine, reshard=ReshardConfig(), prefetch_units=0)

    def problems(self) -> list[Problem]:
        """Every violated rule."""
        rules = [
            ("bucket_mib", isfinite(self.bucket_mib) and self.bucket_mib > 0, "must be finite and above 0"),
            ("shard_replicas", self.shard_replicas is None or self.shard_replicas >= 1, "must be at least 1, or none"),
            ("prefetch_units", self.prefetch_units >= 0, "must not be below 0"),
            ("offload_fraction", 0 < self.offload_fraction <= 1, "must be above 0 and at most 1"),
            ("offload_min_elements", self.offload_min_elements >= 1, "must be at least 1"),
            ("offload_keep_layers", self.offload_keep_layers >= 0, "must not be below 0"),
        ]
        return [
            *(
                Problem(key=f"memory.{name}", value=getattr(self, name), rule=rule)
                for name, holds, rule in rules
                if not holds
            ),
            *entry_problems("memory.recompute", entries_of(self.recompute), RECOMPUTE_UNITS),
            *entry_problems("memory.offload", self.offload, OFFLOAD_UNITS),
        ]


@dataclass(frozen=True, kw_only=True)
class MuonConfig:
    """Muon: momentum, orthogonalised by Newton-Schulz iterations (K. Jordan), scaled as in arXiv 2502.16982.

    Attributes:
        momentum: decay of the momentum.
        nesterov: whether the gradient is added once more to the momentum that is orthogonalised.
        steps: iterations; five bring singular values to between 0.7 and 1.2.
        dtype: of the iterations; `bfloat16` needs half the time and is what the authors use. A run in float64 iterates
            in float64 under `float32`.
        scale: an update of a matrix [m, n] has this root mean square, as one of AdamW has about 0.2: what has singular
            values of one is multiplied by `scale * sqrt(max(m, n))`.
        adamw: patterns of global names whose matrices stay with AdamW; those that are no default must match some.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    dtype: Literal["float32", "bfloat16"] = "float32"
    scale: float = 0.2
    adamw: tuple[str, ...] = ("*embedding*", "*head*", "*router*")

    def __post_init__(self) -> None:
        check_words("optim.muon", self)

    def problems(self) -> list[Problem]:
        """Every violated rule."""
        rules = [
            ("momentum", 0 <= self.momentum < 1, "must be at least 0 and below 1"),
            ("steps", self.steps >= 1, "must be at least 1"),
            ("scale", isfinite(self.scale) and self.scale > 0, "must be finite and above 0"),
        ]
        return [
            Problem(key=f"optim.muon.{name}", value=getattr(self, name), rule=rule)
            for name, holds, rule in rules
            if not holds
        ]


@dataclass(frozen=True, kw_only=True)
class OptimGroup:
    """What parameters whose global names match a pattern do otherwise. The first group that matches decides; one that
    decides nothing is an error.

    Attributes:
        pattern: of global names, such as `*.experts.*`.
        lr_scale: their learning rate as a multiple of that of the step.
        weight_decay: their decay, of vectors too; `default` is `optim.weight_decay` for matrices and 0 for the rest.
        kind: their optimizer; `default` is what `optim.kind` makes of them.
        rows: heights of the matrices that Muon orthogonalises alone, one below the other and repeated down to the last
            row: `[128]` is each head, `[512, 128, 128]` queries, keys and values of each group of heads; empty is the
            whole matrix.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    pattern: str
    lr_scale: float = 1.0
    weight_decay: float | Literal["default"] = "default"
    kind: Literal["adamw", "muon", "default"] = "default"
    rows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_words("optim.groups", self)

    def problems(self) -> list[Problem]:
        """Every violated rule."""
        decay = self.weight_decay
        rules = [
            ("lr_scale", isfinite(self.lr_scale) and self.lr_scale >= 0, "must be finite and not below 0"),
            ("weight_decay", decay == "default" or (isfinite(decay) and decay >= 0), "must be finite and not below 0"),
            ("rows", all(rows >= 1 for rows in self.rows), "must be numbers of rows of at least 1"),
        ]
        return [
            Problem(key="optim.groups", value=getattr(self, name), rule=f"{name} of {self.pattern!r} {rule}")
            for name, holds, rule in rules
            if not holds
        ]


MomentDtype = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (arXiv 1711.05101) or Muon, their state, and the learning-rate schedule.

    Where a dtype is `float32` a run that computes in float64 has float64. What computes in the internal dtype, such as
    a router, keeps its master weights and gradients there. Master weights and moments in bfloat16 are rounded
    stochastically, gradients to the nearest.

    Attributes:
        kind: `muon` takes matrices, each expert's alone, but those of `muon.adamw`; everything else is AdamW's.
        lr: largest learning rate.
        schedule: after the warm-up, `cosine` falls to `min_lr_fraction * lr` at the last step, `constant` stays.
        warmup_steps: updates over which the rate rises linearly to `lr`.
        min_lr_fraction: end of the cosine as a share of `lr`.
        beta1, beta2: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay of matrices, times the learning rate.
        max_grad_norm: gradients are scaled down to this global L2 norm; None leaves them.
        master_dtype: of the weights that updates are added to.
        gradient_dtype: in which gradients of microbatches and of ranks are added up.
        exp_avg_dtype, exp_avg_sq_dtype: of the moments; the momentum of Muon is an `exp_avg`. `int8` is a code of 8
            bits and one scale for 256 values (arXiv 2110.02861), for matrices; vectors stay in float32.
        offload: where state is between updates. `state` keeps moments, and master weights that are no weights of the
            model, in host memory and brings them back for the update, some buffers ahead; `step` also updates a share
            of the buffers of AdamW on the host, so that only gradients leave and only weights come back.
        offload_fraction: of the elements that AdamW updates, with `offload = "step"`, which share the host updates.
            Below 1 parameters that ranks besides the replicas hold copies of, such as norms under `tp`, are not shared.
        groups: parameters that are updated otherwise.
        muon: settings of that optimizer.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["adamw", "muon"] = "adamw"
    lr: float = 3e-3
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_steps: int = 20
    min_lr_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    gradient_dtype: Literal["float32", "bfloat16"] = "float32"
    exp_avg_dtype: MomentDtype = "float32"
    exp_avg_sq_dtype: MomentDtype = "float32"
    offload: Literal["none", "state", "step"] = "none"
    offload_fraction: float = 1.0
    groups: tuple[OptimGroup, ...] = ()
    muon: MuonConfig = field(default_factory=MuonConfig)

    def __post_init__(self) -> None:
        check_words("optim", self)

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
            ("offload_fraction", 0 <= self.offload_fraction <= 1, "must lie between 0 and 1"),
        ]
        return [
            *(
                Problem(key=f"optim.{name}", value=getattr(self, name), rule=rule)
                for name, holds, rule in rules
                if not holds
            ),
            *self.muon.problems(),
            *(problem for group in self.groups for problem in group.problems()),
            *(self._without_muon(group) for group in self.groups if group.rows and self._kind_of(group) == "adamw"),
        ]

    def _kind_of(self, group: OptimGroup) -> str:
        return self.kind if group.kind == "default" else group.kind

    def _without_muon(self, group: OptimGroup) -> Problem:
        rule = f"rows of {group.pattern!r} are for Muon, and AdamW updates these"
        return Problem(key="optim.groups", value=group.rows, rule=rule, legal="no rows, or kind = 'muon'")


def state_problems(memory: MemoryConfig, optim: OptimConfig) -> list[Problem]:
    """Rules between where state lives and what it is; settings without effect violate one."""
    found = list(_without_effect(memory, optim))
    for name in ("master_dtype", "gradient_dtype"):
        if getattr(optim, name) == "bfloat16" and memory.compute_dtype != "bfloat16":
            rule = f"has fewer bits than the weights, which compute in {memory.compute_dtype}"
            legal = "float32, or memory.compute_dtype = 'bfloat16'"
            found.append(Problem(key=f"optim.{name}", value="bfloat16", rule=rule, legal=legal))
    if memory.data_parallel == "fsdp" and optim.offload == "step":
        rule = "brings weights back to where fully_shard keeps them, which it does not allow"
        legal = "none, state, or memory.data_parallel = 'zero1'"
        found.append(Problem(key="optim.offload", value="step", rule=rule, legal=legal))
    if memory.data_parallel == "fsdp" and optim.master_dtype == "bfloat16" and optim.gradient_dtype == "float32":
        rule = "cannot be more exact than the master weights that fully_shard cuts, optim.master_dtype = 'bfloat16'"
        legal = "bfloat16, or memory.data_parallel = 'zero1'"
        found.append(Problem(key="optim.gradient_dtype", value="float32", rule=rule, legal=legal))
    return found


def _without_effect(memory: MemoryConfig, optim: OptimConfig) -> Iterator[Problem]:
    """Settings of what is off."""
    if memory.data_parallel == "zero1":
        rule = "says when weights are cut and gathered, and zero1 keeps whole ones"
        otherwise = "memory.data_parallel = 'fsdp'"
        yield from _changed("memory.reshard", memory.reshard, rule, otherwise)
        yield from _changed("memory", memory, rule, otherwise, "prefetch_units")
    if optim.offload != "step":
        rule = f"is the share of the host, which updates nothing with optim.offload = {optim.offload!r}"
        yield from _changed("optim", optim, rule, "optim.offload = 'step'", "offload_fraction")
    if "muon" not in {optim.kind, *(group.kind for group in optim.groups)}:
        yield from _changed("optim.muon", optim.muon, "is for Muon, which updates nothing here", "optim.kind = 'muon'")


def _changed(section: str, config: Any, rule: str, otherwise: str, *names: str) -> Iterator[Problem]:
    """A problem for each option that has another value than by default, of these or of all."""
    default = type(config)()
    for name in names or [option.name for option in fields(config)]:
        value = getattr(config, name)
        if value != getattr(default, name):
            key, legal = f"{section}.{name}", f"the default, or {otherwise}"
            yield Problem(key=key, value=value, rule=rule, legal=legal)
