"""`Groups`: the process groups of this rank by axis name."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from moe_parallel.errors import MoeParallelError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def context_axis(ranks: int) -> str:
    """The axis of so many neighbours of `cp` and `dp` together, which share rows under dynamic context parallelism."""
    return f"cp_of_{ranks}"


@runtime_checkable
class Groups(Protocol):
    """Where this rank stands on every axis (`tp cp dp pp ep etp edp`), and with whom it communicates there.

    Several axes of one view (`"cp", "dp"`, in any order) name the group that spans them; `world` is every rank. `cp`
    and `ep` may be cut in two, for communication in two levels: `ep_inner` are the neighbours of a rank, `ep_outer` are
    those at its place in every neighbourhood.
    """

    def size(self, *axes: str) -> int:
        """Number of ranks that the axes span."""

    def rank(self, *axes: str) -> int:
        """Place of this rank among them, `0 <= rank < size`; the first axis of the view varies fastest."""

    def group(self, *axes: str) -> "ProcessGroup | None":
        """The process group of the axes; None where they have one rank, which needs no communication."""

    def coordinates(self) -> Mapping[str, int]:
        """Coordinate by axis, for messages and logs."""


class AxisGroups:
    """Groups from existing process groups; axes that are not given have size 1.

    `AxisGroups()` is the world of one process.

    Args:
        groups: axis name, or the names of several axes, to the process group that spans them. The caller keeps
            ownership and destroys them.
    """

    def __init__(self, groups: "Mapping[str | tuple[str, ...], ProcessGroup] | None" = None) -> None:
        self._groups = {
            frozenset([axes] if isinstance(axes, str) else axes): group for axes, group in (groups or {}).items()
        }

    def size(self, *axes: str) -> int:
        group = self._find(axes)
        return 1 if group is None else group.size()

    def rank(self, *axes: str) -> int:
        group = self._find(axes)
        return 0 if group is None else group.rank()

    def group(self, *axes: str) -> "ProcessGroup | None":
        group = self._find(axes)
        return None if group is None or group.size() == 1 else group

    def coordinates(self) -> Mapping[str, int]:
        return {axis: group.rank() for axes, group in self._groups.items() if len(axes) == 1 for axis in axes}

    def _find(self, axes: tuple[str, ...]) -> "ProcessGroup | None":
        """The group that was given for just these axes, else the one of those that have several ranks."""
        wide = [axis for axis in axes if (group := self._groups.get(frozenset([axis]))) and group.size() > 1]
        found = self._groups.get(frozenset(axes)) or self._groups.get(frozenset(wide))
        if found is None and (
            wide or (axes == ("world",) and any(group.size() > 1 for group in self._groups.values()))
        ):
            raise MoeParallelError(f"no process group was given that spans the axes {', '.join(axes)}")
        return found
