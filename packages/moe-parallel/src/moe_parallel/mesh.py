"""`FoldedMesh`: the process groups of both views of one world (Parallel Folding, arXiv 2504.14960)."""

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_parallel.collectives import describe_members, lost_peers
from moe_parallel.errors import MoeParallelError
from moe_parallel.groups import context_axis
from moe_parallel.layout import ParallelLayout
from moe_parallel.sharding import SHARED_AXES

# Axes that share activations, and axes that share gradients. Where two of a row span the same ranks they share one
# process group. The rows do not share: on NCCL a group is one queue, and a gradient reduction that runs under the
# backward must not hold up the tokens that the next layer waits for.
ACTIVATION_AXES = (("tp",), ("cp",), ("tp", "cp"), ("pp",), ("ep",), ("etp",), ("etp", "ep"))
GRADIENT_AXES = (("dp",), ("cp", "dp"), ("tp", "cp", "dp"), ("edp",), ("etp", "edp"))

# Of a pipeline the messages besides outputs that go to later ranks: outputs that go to earlier ones, as in a V, and
# gradients to earlier and to later ones. Two ranks that send to each other in one queue would wait for each other.
MESSAGE_AXES = ("pp_down", "pp_back", "pp_back_up")

# An axis may be cut in two: `inner` has runs of consecutive places, such as the ranks of one node (a node group), and
# `outer` the same place of every run (a rail group). The inner varies faster. By axis: the two, in this order.
CUT_AXES = {"cp": ("cp_inner", "cp_outer"), "ep": ("ep_inner", "ep_outer")}


class FoldedMesh:
    """`Groups` over several processes, for every axis of both views and the combinations that are used.

    Collective: every rank of the default process group builds the same mesh at the same time. A group is made by its
    members alone, so that building costs a rank the number of its own groups, whatever the size of the world; all ranks
    must have made as many groups before. The groups end with the default one (`destroy_process_group`).

    Args:
        layout: of as many ranks as the default process group has.
        timeout_s: after so long without its peers a collective of these groups fails; the default group (`world`) has
            the time that it was initialised with.
        context_sizes: for dynamic context parallelism, divisors of cp * dp: for each of them an axis
            `context_axis(size)` of so many consecutive ranks of `cp` and `dp`, alone and with `tp`.
        cp_inner: consecutive ranks of `cp` that are on the axis `cp_inner`; `cp_outer` has the others. A divisor of cp.
        ep_inner: the same of `ep`, which `ep_inner` and `ep_outer` cut. With etp > 1 consecutive places of `ep` are etp
            ranks apart: a node of L ranks has L / etp of them (`Topology.run_on_node` counts them).
        shared: further axes (`SHARED_AXES`), each of some ranks of `pp`, by their places there.

    Raises:
        MoeParallelError: the layout is illegal or of another world, or torch.distributed is not initialised.
        CollectiveError: a member of a group died or did not come in time.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        *,
        timeout_s: float,
        context_sizes: Sequence[int] = (),
        cp_inner: int = 1,
        ep_inner: int = 1,
        shared: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        layout.check()
        self.cp_inner, self.ep_inner = cp_inner, ep_inner
        self._inner_size = {"cp": cp_inner, "ep": ep_inner}
        for axis, inner in self._inner_size.items():
            if inner < 1 or layout.size(axis) % inner:
                raise MoeParallelError(f"{axis}_inner = {inner} does not divide {axis} = {layout.size(axis)}")
        for size in context_sizes:
            if size < 1 or layout.cp * layout.dp % size:
                raise MoeParallelError(
                    f"context_sizes has {size}, which does not divide cp * dp = {layout.cp} * {layout.dp}"
                )
        for axis, places in (shared or {}).items():
            if axis not in SHARED_AXES or not set(places) <= set(range(layout.pp)):
                raise MoeParallelError(
                    f"the shared axis {axis} has the places {', '.join(map(str, places))}; axes are "
                    f"{', '.join(SHARED_AXES)}, and places in the pipeline 0 to {layout.pp - 1}"
                )
        if not dist.is_initialized():
            raise MoeParallelError("torch.distributed is not initialised, so there are no ranks to make groups of")
        if dist.get_world_size() != layout.world:
            raise MoeParallelError(
                f"the layout is for {layout.world} ranks, the default process group has {dist.get_world_size()}"
            )
        self.layout = layout
        self.timeout_s = timeout_s
        self._context_size = {context_axis(size): size for size in context_sizes}
        self._shared = dict(shared or {})
        self._rank = dist.get_rank()
        self._members_of: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._groups: dict[frozenset[str], ProcessGroup] = {}
        further_axes: list[tuple[str, ...]] = []
        further_axes += [(part,) for axis, inner in self._inner_size.items() if inner > 1 for part in CUT_AXES[axis]]
        further_axes += [axes for axis in self._context_size for axes in ((axis,), ("tp", axis))]
        for row in ((*ACTIVATION_AXES, *further_axes), GRADIENT_AXES, *(((axis,),) for axis in MESSAGE_AXES)):
            self._groups |= self._make(row)
        for axis in self._shared:
            # Also who is alone on it makes a group, since all must have made as many before the next.
            group = self._new_group(axis, self._members((axis,)))
            if group.size() > 1:
                self._groups[frozenset([axis])] = group

    def size(self, *axes: str) -> int:
        return self.layout.world if axes == ("world",) else len(self._members(axes))

    def rank(self, *axes: str) -> int:
        return self._rank if axes == ("world",) else self._members(axes).index(self._rank)

    def group(self, *axes: str) -> ProcessGroup | None:
        if self.size(*axes) == 1:
            return None
        if axes == ("world",):
            return dist.group.WORLD
        for axis, (_, outer) in CUT_AXES.items():
            if axes == (outer,) and self._inner_size[axis] == 1:
                axes = (axis,)
        # Of `cp` and `cp * dp`, which span the same ranks where dp is 1, each has its own: they are from both rows.
        group = self._groups.get(frozenset(axes)) or self._groups.get(self._wide(axes))
        if group is None:
            combinations = [" * ".join(known) for known in (*ACTIVATION_AXES, *GRADIENT_AXES)]
            raise MoeParallelError(f"no group spans {' * '.join(axes)}; groups are made for {', '.join(combinations)}")
        return group

    def coordinates(self) -> Mapping[str, int]:
        return self.layout.coordinates(self._rank)

    def _members(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        if axes not in self._members_of:
            self._members_of[axes] = self._other_members(axes) or self.layout.group_of(self._rank, *axes)
        return self._members_of[axes]

    def _other_members(self, axes: tuple[str, ...]) -> tuple[int, ...] | None:
        """Members of the axes that are no axes of the layout."""
        sizes = [self._context_size[axis] for axis in axes if axis in self._context_size]
        if sizes and set(axes) - self._context_size.keys() <= {"tp"}:
            beside = ("tp",) if "tp" in axes else ()
            ranks = self.layout.group_of(self._rank, *beside, "cp", "dp")
            size = sizes[0] * (self.layout.tp if beside else 1)
            first = ranks.index(self._rank) // size * size
            return ranks[first : first + size]
        if len(axes) != 1:
            return None
        if axes[0] in MESSAGE_AXES:
            return self.layout.group_of(self._rank, "pp")
        if axes[0] in SHARED_AXES:
            ranks = self.layout.group_of(self._rank, "pp")
            members = tuple(ranks[place] for place in sorted(set(self._shared.get(axes[0], ()))))
            return members if self._rank in members else (self._rank,)
        for axis, parts in CUT_AXES.items():
            if axes[0] in parts:
                ranks, size = self.layout.group_of(self._rank, axis), self._inner_size[axis]
                run, place = divmod(ranks.index(self._rank), size)
                return ranks[run * size : (run + 1) * size] if axes[0] == parts[0] else ranks[place::size]
        return None

    def _wide(self, axes: tuple[str, ...]) -> frozenset[str]:
        return frozenset(axis for axis in axes if self.size(axis) > 1)

    def _make(self, row: Sequence[tuple[str, ...]]) -> dict[frozenset[str], ProcessGroup]:
        """Groups of this rank for a row of axes, one for each set of ranks."""
        groups: dict[frozenset[str], ProcessGroup] = {}
        made: dict[tuple[int, ...], ProcessGroup] = {}
        for axes in row:
            ranks = self._members(axes)
            if len(ranks) == 1:
                continue
            if ranks not in made:
                name = " = ".join(" * ".join(other) for other in row if self._members(other) == ranks)
                made[ranks] = self._new_group(name, ranks)
            groups[frozenset(axes)] = made[ranks]
        return groups

    def _new_group(self, name: str, ranks: tuple[int, ...]) -> ProcessGroup:
        began = time.monotonic()
        timeout = timedelta(seconds=self.timeout_s)
        try:
            group: ProcessGroup = dist.new_group(
                list(ranks), timeout=timeout, use_local_synchronization=True, group_desc=name
            )
            return group
        except RuntimeError as error:
            doing = f"making {describe_members(name, ranks)}"
            raise lost_peers(doing, ranks, time.monotonic() - began, error) from error
