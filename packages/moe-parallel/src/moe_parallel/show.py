"""A layout as text: both views of the world, what each axis costs in links, and where ranks sit."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from moe_parallel.layout import DENSE_AXES, EXPERT_AXES, ParallelLayout
from moe_parallel.topology import Topology

# Larger grids than this are of no use to a reader.
_MOST_COLUMNS = 16
_MOST_ROWS = 16
_MOST_IN_A_LINE = 120


def describe(layout: ParallelLayout, topology: Topology) -> str:
    """Both views of a legal layout, and the placement of its first pipeline stage; ASCII, lines of at most 120 columns.

    Raises:
        MoeParallelError: the layout is illegal.
    """
    layout.check()
    return "\n".join(
        [
            f"{layout.world} ranks on {topology.num_nodes} nodes",
            "",
            *_view(layout, topology, "dense", DENSE_AXES),
            "",
            *_view(layout, topology, "expert", EXPERT_AXES),
            "",
            *_placement(layout, topology),
        ]
    )


def describe_rank(layout: ParallelLayout, topology: Topology, rank: int) -> str:
    """Coordinates of one rank and its group on every axis.

    Raises:
        MoeParallelError: the layout is illegal, or there is no such rank.
    """
    places = layout.coordinates(rank)
    lines = [f"rank {rank} on node {topology.node_of[rank]}"]
    for axis, place in places.items():
        if layout.size(axis) > 1:
            lines.append(f"  {axis:4} {place:5} of {layout.size(axis):<5} {_ranks(layout.group_of(rank, axis))}")
    return "\n".join(lines)


def _view(layout: ParallelLayout, topology: Topology, name: str, axes: Sequence[str]) -> Iterator[str]:
    sizes = [f"{axis} {layout.size(axis)}" for axis in axes]
    yield f"{name} view: {', '.join(sizes)} (fastest first)"
    yield "  axis    size  groups  stride  nodes per group  first group"
    stride = 1
    for axis in axes:
        groups = layout.groups(axis)
        nodes = max(len({topology.node_of[rank] for rank in group}) for group in groups)
        yield (f"  {axis:4}  {layout.size(axis):6}  {len(groups):6}  {stride:6}  {nodes:15}  {_ranks(groups[0])}")
        stride *= layout.size(axis)


def _placement(layout: ParallelLayout, topology: Topology) -> Iterator[str]:
    stage = layout.group_of(0, "tp", "cp", "dp")
    more = f", and so on for {layout.pp} stages" if layout.pp > 1 else ""
    yield f"placement of the ranks of pp 0 ({_ranks(stage)}{more})"
    yield "  dense: one row for each dp and cp, one column for each tp"
    yield from _grid(
        [f"dp{dp} cp{cp}" for dp in range(layout.dp) for cp in range(layout.cp)], layout.tp, stage, topology
    )
    yield "  expert: one row for each edp, one column for each ep and etp"
    yield from _grid([f"edp{edp}" for edp in range(layout.edp)], layout.ep * layout.etp, stage, topology)


def _grid(labels: Sequence[str], columns: int, ranks: Sequence[int], topology: Topology) -> Iterator[str]:
    """Rows of consecutive ranks; a bar where the next rank is on another node."""
    indent, width = 4 + max(map(len, labels[:_MOST_ROWS])), len(str(max(ranks)))
    shown = min(columns, _MOST_COLUMNS, (_MOST_IN_A_LINE - indent - len(" ...")) // (width + 3))
    for row, label in enumerate(labels[:_MOST_ROWS]):
        members = ranks[row * columns : row * columns + shown]
        text = ""
        for number, rank in enumerate(members):
            new_node = number > 0 and topology.node_of[rank] != topology.node_of[members[number - 1]]
            text += (" | " if new_node else "   ") + f"{rank:{width}}"
        yield f"    {label:{indent - 4}}{text}{' ...' if columns > shown else ''}"
    if len(labels) > _MOST_ROWS:
        yield f"    ... {len(labels) - _MOST_ROWS} rows more"


def _ranks(ranks: Sequence[int]) -> str:
    """Members in few words: `0-15`, `0, 8, ..., 56`."""
    steps = {later - earlier for earlier, later in pairwise(ranks)}
    if len(ranks) > 2 and steps == {1}:
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 4:
        return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    return ", ".join(map(str, ranks))
