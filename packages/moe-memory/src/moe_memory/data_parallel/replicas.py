"""`Replicas`: the ranks that hold the same parameters, and over how many of them state is sharded.

State is sharded over all replicas, or over runs of neighbours, such as those of one node, and then every run has all of
it: gradients are scattered inside a run and summed over the runs, weights are gathered inside a run only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import gcd
from typing import TYPE_CHECKING

import torch.distributed as dist

from moe_memory.errors import MoeMemoryError
from moe_parallel import FoldedMesh, Groups, ParameterKind, replica_axes

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Replicas:
    """The replicas of parameters of one kind, from one of them.

    Attributes:
        shard: over which state is cut; None where this rank has all of it.
        copy: one rank of each run, with the same part of the state; None where there is one run.
    """

    shard: "ProcessGroup | None"
    copy: "ProcessGroup | None" = None

    @property
    def is_first_copy(self) -> bool:
        """Whether this rank answers for its part of the state."""
        return self.copy is None or self.copy.rank() == 0


def replicas_of(groups: Groups, shard_replicas: int | None) -> dict[ParameterKind, Replicas]:
    """The replicas of each kind.

    Collective if `shard_replicas` is given: every rank makes as many groups.

    Args:
        shard_replicas: length of a run of `cp dp`. Experts, of which there are fewer replicas, have runs of its
            greatest common divisor with `edp`. None is one run of all.

    Raises:
        MoeMemoryError: it does not divide the number of replicas.
    """
    if shard_replicas is None:
        return {kind: Replicas(groups.group(*replica_axes(kind))) for kind in ParameterKind}
    size = groups.size(*replica_axes(ParameterKind.DENSE))
    if shard_replicas < 1 or size % shard_replicas:
        raise MoeMemoryError(
            f"memory.shard_replicas = {shard_replicas} does not divide the {size} replicas of cp * dp, so that runs "
            "would differ in length"
        )
    if groups.size("world") == 1:
        return {kind: Replicas(None) for kind in ParameterKind}
    found = {}
    for kind in ParameterKind:
        group = groups.group(*replica_axes(kind))
        ranks = [dist.get_rank()] if group is None else dist.get_process_group_ranks(group)
        run = shard_replicas if kind is ParameterKind.DENSE else gcd(shard_replicas, len(ranks))
        number, place = divmod(ranks.index(dist.get_rank()), run)
        shard = _new_group(groups, ranks[number * run : (number + 1) * run], f"shards of {kind.value} parameters")
        copy = _new_group(groups, ranks[place::run], f"copies of shards of {kind.value} parameters")
        found[kind] = Replicas(shard, copy)
    return found


def _new_group(groups: Groups, ranks: Sequence[int], name: str) -> "ProcessGroup | None":
    # Also who is alone makes a group, since all must have made as many before the next.
    timeout = timedelta(seconds=groups.timeout_s) if isinstance(groups, FoldedMesh) else None
    group = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name)
    return None if len(ranks) == 1 else group
