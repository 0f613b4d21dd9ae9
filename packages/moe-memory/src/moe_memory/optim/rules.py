"""How each parameter is updated: by which optimizer, at which rate, with which decay, and what its state is kept in."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch

from moe_kernels import internal_dtype
from moe_memory.config import MuonConfig, OptimConfig
from moe_memory.errors import MoeMemoryError
from moe_memory.optim.blocks import block_dim
from moe_memory.optim.decay import is_decayed
from moe_parallel import ShardSpec

# Slots of state in the order of a checkpoint; scales follow the codes that they belong to.
ADAMW_SLOTS = ("exp_avg", "exp_avg_sq")
MUON_SLOTS = ("exp_avg",)


@dataclass(frozen=True, kw_only=True)
class UpdateRule:
    """What parameters that lie in one buffer have in common for the optimizer.

    Attributes:
        kind: `adamw` or `muon`.
        lr_scale: times the learning rate of the step.
        weight_decay: times the learning rate, too.
        rows: heights of matrices that are orthogonalised alone (`OptimGroup.rows`); of Muon only.
        internal: dtype of the arithmetic, at least float32.
        master: dtype of the master weights.
        gradient: dtype of the gradients that are summed.
        slots: name and dtype of each number of state; uint8 are codes, of which blocks have a scale.
    """

    kind: Literal["adamw", "muon"]
    lr_scale: float
    weight_decay: float
    rows: tuple[int, ...]
    internal: torch.dtype
    master: torch.dtype
    gradient: torch.dtype
    slots: tuple[tuple[str, torch.dtype], ...]

    @property
    def has_blocks(self) -> bool:
        """Whether some state is in codes, so that parameters may only be cut between blocks."""
        return any(dtype == torch.uint8 for _, dtype in self.slots)

    @property
    def is_plain(self) -> bool:
        """Whether weights, gradients and state all have the dtype of the arithmetic."""
        return {self.master, self.gradient, *(dtype for _, dtype in self.slots)} == {self.internal}


def update_rule(
    config: OptimConfig,
    spec: ShardSpec,
    compute_dtype: torch.dtype,
    decayed: Callable[[ShardSpec], bool] = is_decayed,
) -> UpdateRule:
    """The rule of a parameter.

    Args:
        compute_dtype: of its weights.
        decayed: whether it has weight decay if no group says so.

    Raises:
        MoeMemoryError: Muon is asked for what is no matrix, or `rows` do not fill it.
    """
    group = next((group for group in config.groups if fnmatchcase(spec.name, group.pattern)), None)
    matrix = is_decayed(spec)
    kind: Literal["adamw", "muon"] = "adamw"
    if group is not None and group.kind != "default":
        kind = group.kind
        if kind == "muon" and not matrix:
            raise MoeMemoryError(
                f"optim.groups give {spec.name} of shape {spec.shape} to Muon, which updates matrices; "
                f"narrow the pattern {group.pattern!r} or leave kind out"
            )
    elif config.kind == "muon" and matrix and not any(fnmatchcase(spec.name, p) for p in config.muon.adamw):
        kind = "muon"
    decay = config.weight_decay if decayed(spec) else 0.0
    internal = internal_dtype(compute_dtype)
    low = compute_dtype != internal
    names = MUON_SLOTS if kind == "muon" else ADAMW_SLOTS
    wanted = {"exp_avg": config.exp_avg_dtype, "exp_avg_sq": config.exp_avg_sq_dtype}
    may_have_blocks = block_dim(spec) is not None
    dtypes = {
        "float32": internal,
        "bfloat16": torch.bfloat16,
        "int8": torch.uint8 if may_have_blocks else internal,
    }
    return UpdateRule(
        kind=kind,
        lr_scale=1.0 if group is None else group.lr_scale,
        weight_decay=decay if group is None or group.weight_decay == "default" else group.weight_decay,
        rows=group.rows if group is not None and kind == "muon" else (),
        internal=internal,
        master=torch.bfloat16 if low and config.master_dtype == "bfloat16" else internal,
        gradient=torch.bfloat16 if low and config.gradient_dtype == "bfloat16" else internal,
        slots=tuple((name, dtypes[wanted[name]]) for name in names),
    )


def check_patterns(config: OptimConfig, names: Collection[str]) -> None:
    """Refuse patterns without effect; those that `optim.muon.adamw` has by default need not fit every model.

    Args:
        names: global names of all parameters of the whole model.

    Raises:
        MoeMemoryError: a pattern of `optim.groups` or `optim.muon.adamw` matches no parameter, or earlier groups take
            all that a group matches.
    """
    own = [pattern for pattern in config.muon.adamw if pattern not in MuonConfig().adamw]
    for key, patterns in (("groups", [group.pattern for group in config.groups]), ("muon.adamw", own)):
        for pattern in patterns:
            if not any(fnmatchcase(name, pattern) for name in names):
                some = ", ".join(sorted(names)[:3])
                raise MoeMemoryError(
                    f"the pattern {pattern!r} in optim.{key} matches no parameter; parameters have names such as {some}"
                )
    for place, group in enumerate(config.groups):
        earlier = [other.pattern for other in config.groups[:place]]
        matched = [name for name in names if fnmatchcase(name, group.pattern)]
        taken_by = [next((pattern for pattern in earlier if fnmatchcase(name, pattern)), None) for name in matched]
        if None not in taken_by:
            raise MoeMemoryError(
                f"the group {group.pattern!r} in optim.groups reaches no parameter: the first group that matches "
                f"decides, and {', '.join(map(repr, dict.fromkeys(taken_by)))} before it take all {len(matched)} that "
                "it matches; put it before them, or leave it out"
            )


def check_precision(config: OptimConfig, compute_dtype: torch.dtype) -> None:
    """Refuse dtypes without effect.

    Raises:
        MoeMemoryError: master weights or gradients are to have fewer bits than weights that compute in the internal
            dtype, which is never done.
    """
    for name in ("master_dtype", "gradient_dtype"):
        if getattr(config, name) == "bfloat16" and compute_dtype == internal_dtype(compute_dtype):
            raise MoeMemoryError(
                f"optim.{name} = 'bfloat16' would have fewer bits than the weights, which compute in "
                f"{str(compute_dtype).removeprefix('torch.')}; set memory.compute_dtype = 'bfloat16', or leave it out"
            )
