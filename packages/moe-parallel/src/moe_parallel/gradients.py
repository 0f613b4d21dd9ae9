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
from moe_parallel.sharding import REPLICA_AXES, ParameterKind, ShardSpec


def replica_axes(kind: ParameterKind) -> tuple[str, ...]:
    """Axes over which parameters of a kind are replicated and gradients summed: `cp dp`, or `edp` for experts."""
    return REPLICA_AXES[kind]


def gradient_axes(spec: ShardSpec) -> tuple[str, ...]:
    """All axes over which the gradient of a parameter is summed."""
    return (*REPLICA_AXES[spec.kind], *spec.grad_sum_axes)


def counts_here(spec: ShardSpec, groups: Groups) -> bool:
    """Whether this rank counts its part of a parameter in a sum over the world.

    Ranks that hold the same part (`ShardSpec.copy_axes`), such as a norm on all ranks of `tp`, leave it to the first of
    them. Which of the replicas (`replica_axes`) counts is for the data-parallel engine to say, which may cut the part
    further.
    """
    return all(groups.rank(axis) == 0 for axis in spec.copy_axes)


def reduce_norm_parts(parts: Mapping[str, Tensor], order: float, groups: Groups) -> Tensor:
    """The norm of all gradients, the same number on every rank.

    (sum over ranks and parts)^(1/order), or the largest part for `order = inf`. If any part is not finite, the norm is
    not finite, on every rank.

    Args:
        parts: float64 scalars in which each unique element of the world counts once: a sum of `|g|**order`, or the
            largest `|g|`.
    """
    stacked = torch.stack(list(parts.values()))
    world = groups.group("world")
    if order == inf:
        # The maximum over ranks loses a NaN that meets a number, on gloo as on NCCL.
        largest = stacked.amax().nan_to_num(nan=inf, posinf=inf)
        return largest if world is None else all_reduce(largest, world, "max").wait()
    total = stacked.sum()
    return (total if world is None else all_reduce(total, world).wait()) ** (1 / order)
