"""The plan of a model: what its parameters are globally, declared by name pattern."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from moe_parallel.errors import MoeParallelError
from moe_parallel.groups import Groups
from moe_parallel.sharding import SHARED_AXES, SPLIT_AXES, Box, ParameterKind, ShardSpec

if TYPE_CHECKING:
    from torch import nn

# A message names so many parameters.
_MOST_NAMES = 20


@dataclass(frozen=True, kw_only=True)
class PlanRule:
    """How the parameters whose global name matches are split.

    Attributes:
        pattern: of global names, as of `fnmatch`.
        kind, placements, grad_sum_axes, uneven: as in `ShardSpec`.
    """

    pattern: str
    kind: ParameterKind = ParameterKind.DENSE
    placements: tuple[tuple[str, int], ...] = ()
    grad_sum_axes: tuple[str, ...] = ()
    uneven: bool = False

    def __post_init__(self) -> None:
        legal = SPLIT_AXES[self.kind]
        axes = [*(axis for axis, _ in self.placements), *self.grad_sum_axes]
        summable = {*legal, *SHARED_AXES} if self.kind is ParameterKind.DENSE else {*legal}
        fits = {axis for axis, _ in self.placements} <= set(legal) and set(self.grad_sum_axes) <= summable
        if not fits or len(set(axes)) < len(axes):
            raise MoeParallelError(
                f"the plan rule for {self.pattern} names the axes {', '.join(axes)}; {self.kind.value} parameters are "
                f"split, or their gradients summed, over each of {', '.join(legal)} at most once"
            )


def shard_specs(model: "nn.Module", rules: Sequence[PlanRule], groups: Groups | None = None) -> dict[str, ShardSpec]:
    """Specs by global name, in the order of the model; the first rule that matches wins, without one a parameter is
    dense and whole on every rank.

    Args:
        model: holds whole parameters, on any device.
        groups: given where it holds the part of every parameter that belongs to this rank, of equal parts.

    Raises:
        MoeParallelError: a rule that no parameter reaches, itself or past the rules before it (a pattern without
            effect is a mistake), that splits a dim which a parameter does not have, or that is uneven with `groups`.
    """
    specs, reached = {}, set()
    for name, parameter in model.named_parameters():
        number = next((n for n, rule in enumerate(rules) if fnmatchcase(name, rule.pattern)), None)
        if number is None:
            specs[name] = ShardSpec(name=name, shape=tuple(parameter.shape))
            continue
        reached.add(number)
        rule, shape = rules[number], list(parameter.shape)
        for axis, dim in rule.placements:
            if not 0 <= dim < len(shape):
                raise MoeParallelError(f"the plan splits dim {dim} of {name} over {axis}, but it has {len(shape)} dims")
            if groups is not None:
                if rule.uneven and groups.size(axis) > 1:
                    raise MoeParallelError(
                        f"the parts of {name} are uneven, so its whole shape cannot be told from one of them; give "
                        "shard_specs the whole model, without groups"
                    )
                shape[dim] *= groups.size(axis)
        specs[name] = ShardSpec(
            name=name,
            shape=tuple(shape),
            kind=rule.kind,
            placements=rule.placements,
            grad_sum_axes=rule.grad_sum_axes,
            uneven=rule.uneven,
        )
    unreached = [rule.pattern for number, rule in enumerate(rules) if number not in reached]
    if unreached:
        names = ", ".join([*list(specs)[:_MOST_NAMES], "..."] if len(specs) > _MOST_NAMES else specs)
        raise MoeParallelError(
            f"the plan has patterns that match no parameter, or none that an earlier pattern leaves: "
            f"{', '.join(unreached)}; parameters are {names}"
        )
    return specs


def local_box(spec: ShardSpec, groups: Groups) -> Box:
    """The part of a parameter that this rank holds.

    Several placements on one dim nest, the first outermost. Uneven parts are of ceil(size / ranks) entries as long as
    there are any, the last ones shorter or empty.

    Raises:
        MoeParallelError: a dim does not divide, and the spec does not say that its parts may be uneven.
    """
    offset, shape = [0] * len(spec.shape), list(spec.shape)
    for axis, dim in spec.placements:
        ranks, rank, size = groups.size(axis), groups.rank(axis), shape[dim]
        if size % ranks and not spec.uneven:
            raise MoeParallelError(f"dim {dim} of {spec.name} has {size} entries, not a multiple of {axis} = {ranks}")
        start, stop = part_of(size, ranks, rank)
        offset[dim] += start
        shape[dim] = stop - start
    return Box(tuple(offset), tuple(shape))


def part_of(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """(start, stop) of a rank's part of `size` entries: ceil(size / ranks) each, as long as there are any."""
    part = -(-size // ranks)
    start = min(rank * part, size)
    return start, min(start + part, size)
