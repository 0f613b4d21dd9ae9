"""`FoldedMesh`: the process groups of both views of one world (Parallel Folding, arXiv 2504.14960)."""

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_parallel.errors import MoeParallelError
from moe_parallel.layout import ParallelLayout

# Axes that share activations, and axes that share gradients. Where two of a row span the same ranks they share one
# process group. The rows do not share: on NCCL a group is one queue, and a gradient reduction that runs under the
# backward must not hold up the tokens that the next layer waits for.
ACTIVATION_AXES = (("tp",), ("cp",), ("tp", "cp"), ("pp",), ("ep",), ("etp",), ("etp", "ep"))
GRADIENT_AXES = (("dp",), ("cp", "dp"), ("edp",))


class FoldedMesh:
    """`Groups` over several processes, for every axis of both views and the combinations that are used.

    Collective: every rank of the default process group builds the same mesh at the same time. A group is made by its
    members alone, so that building costs a rank the number of its own groups, whatever the size of the world.

    Args:
        layout: of as many ranks as the default process group has.
        timeout_s: after so long without its peers a collective fails; on every group, the default one included.

    Raises:
        MoeParallelError: the layout is illegal or of another world, or torch.distributed is not initialised.
    """

    def __init__(self, layout: ParallelLayout, *, timeout_s: float) -> None:
        layout.check()
        if not dist.is_initialized():
            raise MoeParallelError("torch.distributed is not initialised, so there are no ranks to make groups of")
        if dist.get_world_size() != layout.world:
            raise MoeParallelError(
                f"the layout is for {layout.world} ranks, the default process group has {dist.get_world_size()}"
            )
        self.layout = layout
        self.timeout_s = timeout_s
        self._coordinates = layout.coordinates(dist.get_rank())
        self._groups: dict[frozenset[str], ProcessGroup] = {}
        for row in (ACTIVATION_AXES, GRADIENT_AXES):
            made: dict[tuple[int, ...], ProcessGroup] = {}
            for axes in row:
                ranks = layout.group_of(dist.get_rank(), *axes)
                if len(ranks) == 1:
                    continue
                if ranks not in made:
                    names = [" * ".join(other) for other in row if layout.group_of(dist.get_rank(), *other) == ranks]
                    made[ranks] = dist.new_group(
                        list(ranks),
                        timeout=timedelta(seconds=timeout_s),
                        use_local_synchronization=True,
                        group_desc=" = ".join(names),
                    )
                self._groups[frozenset(axes)] = made[ranks]

    def size(self, *axes: str) -> int:
        return len(self._members(axes))

    def rank(self, *axes: str) -> int:
        return self._members(axes).index(dist.get_rank())

    def group(self, *axes: str) -> ProcessGroup | None:
        if axes == ("world",):
            return dist.group.WORLD if self.layout.world > 1 else None
        members = self._members(axes)
        if len(members) == 1:
            return None
        wide = frozenset(axis for axis in axes if self.layout.size(axis) > 1)
        for known, group in self._groups.items():
            if wide == {axis for axis in known if self.layout.size(axis) > 1}:
                return group
        combinations = [" * ".join(known) for known in (*ACTIVATION_AXES, *GRADIENT_AXES)]
        raise MoeParallelError(f"no group spans {' * '.join(axes)}; groups are made for {', '.join(combinations)}")

    def coordinates(self) -> Mapping[str, int]:
        return self._coordinates

    def _members(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        if axes == ("world",):
            return tuple(range(self.layout.world))
        return self.layout.group_of(dist.get_rank(), *axes)
