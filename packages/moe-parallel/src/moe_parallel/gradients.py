"""Gradient rules: over which ranks a gradient is summed, and the one norm over all of them (numerics §6).

Every rank computes gradients of its part of ONE scalar, whose weights are already global (`1 / number of targets of
the whole step`), so contributions are added and never averaged. An expert gets the tokens of all ranks of its `ep`
group through the dispatcher; what remains is the sum over its replicas, `edp`.
"""

from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor

from moe_parallel.collectives import all_reduce
from moe_parallel.groups import Groups
from moe_parallel.layout import DENSE_AXES, EXPERT_AXES
from moe_parallel.sharding import ParameterKind, ShardSpec

_REPLICA_AXES = {ParameterKind.DENSE: ("cp", "dp"), ParameterKind.EXPERT: ("edp",)}
_VIEW = {ParameterKind.DENSE: DENSE_AXES, ParameterKind.EXPERT: EXPERT_AXES}


def replica_axes(kind: ParameterKind) -> tuple[str, ...]:
    """Axes over which parameters of a kind are replicated and gradients summed: `cp dp`, or `edp` for experts."""
    return _REPLICA_AXES[kind]


def gradient_axes(spec: ShardSpec) -> tuple[str, ...]:
    """All axes over which the gradient of a parameter is summed."""
    return (*_REPLICA_AXES[spec.kind], *spec.grad_sum_axes)


def counts_here(spec: ShardSpec, groups: Groups) -> bool:
    """Whether this rank counts its part of a parameter in a sum over the world.

    Ranks that hold the same part because an axis other than the replica axes neither splits the parameter nor is
    `pp`, such as a norm on all ranks of `tp`, leave it to the first of them.
    """
    split = {axis for axis, _ in spec.placements} | {"pp", *_REPLICA_AXES[spec.kind]}
    return all(groups.rank(axis) == 0 for axis in _VIEW[spec.kind] if axis not in split)


def reduce_norm_parts(parts: Mapping[str, Tensor], order: float, groups: Groups) -> Tensor:
    """The norm of all gradients, the same number on every rank.

    (sum over ranks and parts)^(1/order), or the largest part for `order = inf`.

    Args:
        parts: float64 scalars in which each unique element of the world counts once: a sum of `|g|**order`, or the
            largest `|g|`.
    """
    stacked = torch.stack(list(parts.values()))
    total = stacked.amax() if order == inf else stacked.sum()
    world = groups.group("world")
    if world is not None:
        total = all_reduce(total, world, "max" if order == inf else "sum").wait()
    return total if order == inf else total ** (1 / order)
