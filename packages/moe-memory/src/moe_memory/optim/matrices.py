"""Which matrices a parameter consists of, as boxes of the whole parameter."""

from collections.abc import Iterator
from itertools import product
from math import prod

from moe_memory.errors import MoeMemoryError
from moe_parallel import Box, ParameterKind, ShardSpec


def matrix_dims(spec: ShardSpec) -> tuple[int, int]:
    """The dims of rows and of columns: the two longest besides that of experts; the others count matrices."""
    first = int(spec.kind is ParameterKind.EXPERT)
    dims = range(first, len(spec.shape))
    rows, columns = sorted(sorted(dims, key=lambda dim: (spec.shape[dim], dim))[-2:])
    return rows, columns


def matrices(spec: ShardSpec, rows: tuple[int, ...] = ()) -> Iterator[Box]:
    """The matrices of a parameter in order, as boxes with one entry along the dims that count them.

    Args:
        rows: heights of those that lie below one another, repeated down to the last row; empty is all rows.

    Raises:
        MoeMemoryError: they do not end with the last row.
    """
    if prod(spec.shape) == 0:
        return
    row_dim, column_dim = matrix_dims(spec)
    height = spec.shape[row_dim]
    rows = rows or (height,)
    if height % sum(rows):
        raise MoeMemoryError(
            f"the rows {list(rows)} of optim.groups add up to {sum(rows)}, of which the {height} rows of {spec.name} "
            "are no multiple"
        )
    others = [dim for dim in range(len(spec.shape)) if dim not in (row_dim, column_dim)]
    for place in product(*(range(spec.shape[dim]) for dim in others)):
        offset, shape = [0] * len(spec.shape), [1] * len(spec.shape)
        for dim, entry in zip(others, place, strict=True):
            offset[dim] = entry
        shape[column_dim] = spec.shape[column_dim]
        for size in rows * (height // sum(rows)):
            shape[row_dim] = size
            yield Box(tuple(offset), tuple(shape))
            offset[row_dim] += size


def intersection(first: Box, second: Box) -> Box | None:
    """The common part of two boxes of one tensor; None where they have no element in common."""
    starts = tuple(map(max, zip(first.offset, second.offset, strict=True)))
    stops = [
        min(a + b, c + d) for a, b, c, d in zip(first.offset, first.shape, second.offset, second.shape, strict=True)
    ]
    shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return None if any(size <= 0 for size in shape) else Box(starts, shape)


def slices(box: Box, inside: Box) -> tuple[slice, ...]:
    """The index of a box in a tensor that holds another box around it."""
    return tuple(
        slice(start - base, start - base + size)
        for start, base, size in zip(box.offset, inside.offset, box.shape, strict=True)
    )
