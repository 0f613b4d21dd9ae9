"""`Groups`: the process groups of this rank by axis name."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@runtime_checkable
class Groups(Protocol):
    """Where this rank stands on every axis (`tp cp dp pp ep etp edp`), and with whom it communicates there."""

    def size(self, axis: str) -> int:
        """Number of ranks on the axis."""

    def rank(self, axis: str) -> int:
        """Coordinate of this rank on the axis, `0 <= rank < size`."""

    def group(self, axis: str) -> "ProcessGroup | None":
        """The process group of the axis; None where the axis has one rank, which needs no communication."""

    def coordinates(self) -> Mapping[str, int]:
        """Coordinate by axis, for messages and logs."""


class AxisGroups:
    """Groups from existing process groups, one per axis; axes that are not given have size 1.

    `AxisGroups()` is the world of one process.

    Args:
        groups: axis name to process group. The caller keeps ownership and destroys them.
    """

    def __init__(self, groups: Mapping[str, "ProcessGroup"] | None = None) -> None:
        self._groups = dict(groups or {})

    def size(self, axis: str) -> int:
        group = self._groups.get(axis)
        return 1 if group is None else group.size()

    def rank(self, axis: str) -> int:
        group = self._groups.get(axis)
        return 0 if group is None else group.rank()

    def group(self, axis: str) -> "ProcessGroup | None":
        group = self._groups.get(axis)
        return None if group is None or group.size() == 1 else group

    def coordinates(self) -> Mapping[str, int]:
        return {axis: group.rank() for axis, group in self._groups.items()}
