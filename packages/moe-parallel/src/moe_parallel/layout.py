"""`ParallelLayout`: where every rank stands in the dense and in the expert view of one world.

Both views factor the same ranks, the first axis varying fastest:

    dense   rank = tp  + TP  * (cp + CP * (dp  + DP  * pp))
    expert  rank = etp + ETP * (ep + EP * (edp + EDP * pp))

The pipeline is outermost in both, so a stage is the same contiguous block of ranks in either view and only `pp` has to
agree (Parallel Folding, arXiv 2504.14960). Pure arithmetic: no process group is made and torch is not imported.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import gcd, isqrt

from moe_parallel.errors import MoeParallelError
from moe_parallel.problem import Problem

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")

_ALL_AXES = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")

# The axes that a user sets; `dp` and `edp` are what is left of the world.
_DENSE_DEGREES = ("tp", "cp", "pp")
_EXPERT_DEGREES = ("etp", "ep", "pp")
_DEGREES = ("tp", "cp", "pp", "ep", "etp")


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """Degrees of parallelism over a world of ranks.

    An illegal layout can be made, so that `problems()` can report everything that is wrong with it at once; asking it
    for anything else raises.

    Attributes:
        world: number of ranks.
        tp: tensor-parallel degree of dense layers.
        cp: context-parallel degree.
        pp: pipeline stages.
        ep: expert-parallel degree.
        etp: tensor-parallel degree inside an expert.
    """

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def dp(self) -> int:
        """Data-parallel degree of dense parameters, `world / (tp * cp * pp)`; raises if the layout is illegal."""
        return self._sizes["dp"]

    @property
    def edp(self) -> int:
        """Data-parallel degree of experts, `world / (etp * ep * pp)`; raises if the layout is illegal."""
        return self._sizes["edp"]

    def size(self, axis: str) -> int:
        """Number of ranks on one of the seven axes.

        Raises:
            MoeParallelError: the axis is unknown, or the layout is illegal.
        """
        self._view((axis,))
        return self._sizes[axis]

    def problems(self, *, num_experts: int | None = None) -> list[Problem]:
        """Every violated rule, in a fixed order; empty for a legal layout.

        Args:
            num_experts: experts of a MoE layer over all ranks; None leaves the rules about experts out.
        """
        if not _is_count(self.world):
            return [Problem(key="world", value=self.world, rule="the number of ranks is an integer of at least 1")]
        found = [
            Problem(
                key=f"parallel.{axis}",
                value=getattr(self, axis),
                rule="a degree is an integer of at least 1",
                legal=self._legal_text(axis, num_experts),
            )
            for axis in _DEGREES
            if not _is_count(getattr(self, axis))
        ]
        for degrees in (_DENSE_DEGREES, _EXPERT_DEGREES):
            found += self._product_problem(degrees, num_experts)
        if num_experts is not None:
            found += self._expert_problem(num_experts)
        return found

    def legal_values(self, axis: str, *, num_experts: int | None = None) -> tuple[int, ...]:
        """Degrees that `axis` may take while the other degrees stay as they are, ascending.

        Only the rules in which the axis takes part count. Empty if the other degrees leave no legal value.

        Raises:
            MoeParallelError: the axis is not one of `tp cp pp ep etp`, or the world is not a number of ranks.
        """
        if axis not in _DEGREES:
            raise MoeParallelError(f"the axis {axis!r} has no degree to choose; axes with one: {', '.join(_DEGREES)}")
        if not _is_count(self.world):
            raise MoeParallelError(str(self.problems()[0]))
        bound = num_experts if axis == "ep" and num_experts is not None and _is_count(num_experts) else 0
        for degrees in (_DENSE_DEGREES, _EXPERT_DEGREES):
            if axis in degrees:
                others = self._product(tuple(other for other in degrees if other != axis))
                if self.world % others:
                    return ()
                bound = gcd(bound, self.world // others)  # gcd(0, n) is n
        return _divisors(bound)

    def check(self, *, num_experts: int | None = None) -> None:
        """Raise if the layout is illegal.

        Raises:
            MoeParallelError: the message has every violated rule, one a line.
        """
        found = self.problems(num_experts=num_experts)
        if found:
            raise MoeParallelError("\n".join(str(problem) for problem in found))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Coordinate of a rank on all seven axes `tp cp dp pp etp ep edp`."""
        sizes, strides = self._sizes, self._strides
        self._check_rank(rank)
        return {axis: rank // strides[axis] % sizes[axis] for axis in _ALL_AXES}

    def words_for(self, rank: int) -> str:
        """A rank and its place on every axis that has several, for messages: `rank 3 of 4 (dp=3 ep=1 edp=1)`."""
        places = self.coordinates(rank)
        words = " ".join(f"{axis}={places[axis]}" for axis in places if self._sizes[axis] > 1)
        return f"rank {rank} of {self.world}" + (f" ({words})" if words else "")

    def rank_at(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """The rank at a place of the dense view.

        Raises:
            MoeParallelError: a coordinate is outside its axis.
        """
        rank = 0
        for axis, coordinate in (("tp", tp), ("cp", cp), ("dp", dp), ("pp", pp)):
            size = self._sizes[axis]
            if not 0 <= coordinate < size:
                raise MoeParallelError(f"{axis} = {coordinate} is outside the axis; legal here: 0 to {size - 1}")
            rank += coordinate * self._strides[axis]
        return rank

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups of ranks that differ only in their coordinates on `axes`.

        The axes are from one view and their order does not matter. Ranks inside a group ascend, groups ascend by their
        first rank, and every rank is in exactly one group. No axis at all gives every rank alone.

        Raises:
            MoeParallelError: an axis is unknown or named twice, or the axes are from both views.
        """
        view = self._view(axes)
        members = self._offsets(axis for axis in view if axis in axes)
        return [
            tuple(first + offset for offset in members)
            for first in self._offsets(axis for axis in view if axis not in axes)
        ]

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of `groups(*axes)` that holds `rank`."""
        view = self._view(axes)
        place = self.coordinates(rank)
        first = rank - sum(place[axis] * self._strides[axis] for axis in axes)
        return tuple(first + offset for offset in self._offsets(axis for axis in view if axis in axes))

    @cached_property
    def _sizes(self) -> dict[str, int]:
        self.check()
        sizes = {axis: getattr(self, axis) for axis in _DEGREES}
        sizes["dp"] = self.world // self._product(_DENSE_DEGREES)
        sizes["edp"] = self.world // self._product(_EXPERT_DEGREES)
        return sizes

    @cached_property
    def _strides(self) -> dict[str, int]:
        strides = {}
        for view in (DENSE_AXES, EXPERT_AXES):
            stride = 1
            for axis in view:
                strides[axis] = stride
                stride *= self._sizes[axis]
        return strides

    def _offsets(self, axes: Iterable[str]) -> list[int]:
        """Ranks that the axes span from rank 0, ascending; the axes come fastest first."""
        offsets = [0]
        for axis in axes:
            steps = range(0, self._sizes[axis] * self._strides[axis], self._strides[axis])
            offsets = [step + offset for step in steps for offset in offsets]
        return offsets

    def _view(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [axis for axis in axes if axis not in DENSE_AXES and axis not in EXPERT_AXES]
        if unknown:
            raise MoeParallelError(
                f"unknown axis {unknown[0]!r}; the dense view has {', '.join(DENSE_AXES)}, "
                f"the expert view {', '.join(EXPERT_AXES)}"
            )
        if len(set(axes)) < len(axes):
            raise MoeParallelError(f"an axis is named twice: {', '.join(axes)}")
        for view in (DENSE_AXES, EXPERT_AXES):
            if set(axes) <= set(view):
                return view
        raise MoeParallelError(
            f"the axes {', '.join(axes)} mix the dense view ({', '.join(DENSE_AXES)}) with the expert view "
            f"({', '.join(EXPERT_AXES)}); a group is made in one of them"
        )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world:
            raise MoeParallelError(f"rank {rank} is outside the world; legal here: 0 to {self.world - 1}")

    def _product(self, axes: tuple[str, ...]) -> int:
        """Product of the degrees; a degree that is no count is reported on its own and counts as 1 here."""
        product = 1
        for axis in axes:
            degree = getattr(self, axis)
            product *= degree if _is_count(degree) else 1
        return product

    def _product_problem(self, degrees: tuple[str, ...], num_experts: int | None) -> list[Problem]:
        product = self._product(degrees)
        if self.world % product == 0:
            return []
        counts = [axis for axis in degrees if _is_count(getattr(self, axis))]
        # Blame the first axis that can mend the product alone; there may be none, then the first that is not 1.
        large = [axis for axis in counts if getattr(self, axis) > 1]
        blamed = next((axis for axis in large if self.legal_values(axis, num_experts=num_experts)), large[0])
        values = " * ".join(str(getattr(self, axis)) for axis in counts)
        return [
            Problem(
                key=f"parallel.{blamed}",
                value=getattr(self, blamed),
                rule=f"{' * '.join(counts)} = {values} = {product} does not divide the world of {self.world} ranks",
                legal=self._legal_text(blamed, num_experts),
            )
        ]

    def _expert_problem(self, num_experts: int) -> list[Problem]:
        if not _is_count(num_experts):
            rule = "the number of experts is an integer of at least 1"
            return [Problem(key="model.num_experts", value=num_experts, rule=rule)]
        if not _is_count(self.ep) or num_experts % self.ep == 0:
            return []
        if num_experts < self.ep:
            rule = f"{num_experts} experts are fewer than ep = {self.ep} ranks, so that some ranks would hold none"
        else:
            rule = f"{num_experts} experts cannot be spread evenly over ep = {self.ep} ranks"
        return [Problem(key="parallel.ep", value=self.ep, rule=rule, legal=self._legal_text("ep", num_experts))]

    def _legal_text(self, axis: str, num_experts: int | None) -> str:
        return ", ".join(str(value) for value in self.legal_values(axis, num_experts=num_experts))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _divisors(number: int) -> tuple[int, ...]:
    small = [value for value in range(1, isqrt(number) + 1) if number % value == 0]
    return tuple(sorted({*small, *(number // value for value in small)}))
