"""How long an exchange is expected to take: a model of bytes and latency. Torch is not imported.

Bytes of the slower kind of link bound the time, since both kinds work at once, and every collective costs a start:

    time = max(network bytes / B_network, NVLink bytes / B_NVLink) + collectives * start

In two levels a token takes one kind of link after the other. Cut into lanes, all but the first lane's share of the
shorter leg is hidden under the longer one. What ranks that share experts hand on to each other follows, too. Not in the
model: the few bytes of metadata, sums and permutations, and unequal loads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from moe_comm.errors import MoeCommError
from moe_comm.volume import Algorithm, RandomRouting, expected_rows

_TWO_LEVELS = ("hybrid", "hybrid_rail_allgather")
_ID_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class LinkSpeeds:
    """What one rank has for itself; the defaults are those of a 400 Gb/s NIC and NVLink of an H100 per GPU.

    Attributes:
        network_gb_per_s: to other nodes, in 10^9 bytes per second and direction.
        nvlink_gb_per_s: to ranks of the node.
        collective_us: until the first byte of a collective moves.
    """

    network_gb_per_s: float = 50.0
    nvlink_gb_per_s: float = 450.0
    collective_us: float = 5.0

    def __post_init__(self) -> None:
        for name in ("network_gb_per_s", "nvlink_gb_per_s"):
            if not getattr(self, name) > 0:
                raise MoeCommError(f"{name} = {getattr(self, name)} is no speed; it must be above 0")
        if not self.collective_us >= 0:
            raise MoeCommError(f"collective_us = {self.collective_us} is no time; it must be at least 0")


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """One MoE layer on one rank.

    Attributes:
        routing: how tokens choose.
        world: ranks of the axis `ep`.
        ranks_per_node: of them on a node.
        etp: ranks that share an expert.
        tokens: of this rank.
        hidden: features of a token.
        itemsize: bytes of a feature.
        probability_itemsize: bytes of a probability.
        lanes: parts of the tokens that follow each other through two levels.
        fixed: what travels has the size of the worst case (`Sizing.capacity_rows`).
    """

    routing: RandomRouting
    world: int
    ranks_per_node: int
    tokens: int
    hidden: int
    itemsize: int = 2
    probability_itemsize: int = 4
    etp: int = 1
    lanes: int = 1
    fixed: bool = False


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What dispatch and combine of a layer cost a rank; their backward costs about as much.

    Attributes:
        algorithm: which.
        network_bytes: sent to other nodes.
        nvlink_bytes: sent to ranks of the node.
        collectives: started one after another.
        time_us: by the model.
        bound: what most of the time is spent on.
    """

    algorithm: Algorithm
    network_bytes: float
    nvlink_bytes: float
    collectives: int
    time_us: float
    bound: str


def estimate(algorithm: Algorithm, size: LayerSize, speeds: LinkSpeeds | None = None) -> Estimate:
    """Bytes, collectives and time of one algorithm.

    Raises:
        MoeCommError: the algorithm cannot serve these ranks (`expected_rows`).
    """
    speeds = speeds or LinkSpeeds()
    rows, of_whole_experts = (
        expected_rows(
            algorithm,
            size.routing,
            world=size.world,
            ranks_per_node=size.ranks_per_node,
            etp=etp,
            fixed=size.fixed,
        )
        for etp in (size.etp, 1)
    )
    choices = 1 if algorithm == "alltoall_per_expert" else size.routing.top_k
    there = size.hidden * size.itemsize + choices * (_ID_BYTES + size.probability_itemsize)
    both_ways = size.tokens * (there + size.hidden * size.itemsize)
    network_bytes, nvlink_bytes = rows.network * both_ways, rows.nvlink * both_ways
    network_us = network_bytes / speeds.network_gb_per_s / 1e3
    nvlink_us = nvlink_bytes / speeds.nvlink_gb_per_s / 1e3
    handed_on_us = nvlink_us * (1 - of_whole_experts.nvlink / rows.nvlink) if rows.nvlink else 0.0

    nodes = size.world // size.ranks_per_node
    is_cut = algorithm in _TWO_LEVELS and nodes > 1 and size.ranks_per_node > 1
    hops = (0 if algorithm == "local" else 2 if is_cut else int(size.world > 1)) + (size.etp > 1)
    lanes = size.lanes if algorithm in _TWO_LEVELS else 1
    # The sizes; then rows, with probabilities and ids beside them, there, and rows back.
    collectives = 1 + 3 * hops * lanes if hops else 0
    start_us = collectives * speeds.collective_us
    if is_cut:
        move_us = max(network_us, nvlink_us) + min(network_us, nvlink_us) / lanes
    else:
        move_us = max(network_us, nvlink_us - handed_on_us) + handed_on_us
    _, bound = max((network_us, "the network"), (nvlink_us, "NVLink"), (start_us, "the starts of collectives"))
    return Estimate(
        algorithm=algorithm,
        network_bytes=network_bytes,
        nvlink_bytes=nvlink_bytes,
        collectives=collectives,
        time_us=move_us + start_us,
        bound=bound if hops else "nothing",
    )


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Algorithms by time.

    Attributes:
        estimates: the fastest first; of equal ones the simpler first.
        reason: a sentence without a full stop that says what was taken, and why not the next.
    """

    estimates: tuple[Estimate, ...]
    reason: str

    @property
    def best(self) -> Estimate:
        """The fastest."""
        return self.estimates[0]


def cheapest(size: LayerSize, speeds: LinkSpeeds | None = None, *, among: Sequence[Algorithm] | None = None) -> Ranking:
    """Rank the algorithms that can serve these ranks.

    Args:
        size: of the layer.
        speeds: of the links.
        among: those to choose from, the simplest first; all of them unless given.

    Raises:
        MoeCommError: none of them can.
    """
    candidates: Sequence[Algorithm] = get_args(Algorithm) if among is None else among
    able = [algorithm for algorithm in candidates if algorithm != "local" or size.world == 1]
    if not able:
        raise MoeCommError(f"none of {', '.join(candidates) or 'no algorithms'} can serve {size.world} ranks")
    estimates = sorted((estimate(algorithm, size, speeds) for algorithm in able), key=lambda found: found.time_us)
    best, *others = estimates
    reason = f"{best.algorithm} takes {_time(best)} for a layer's dispatch and combine by the model, {_spent(best)}"
    if others:
        reason += f"; next is {others[0].algorithm} with {_time(others[0])}, {_spent(others[0])}"
    return Ranking(estimates=tuple(estimates), reason=reason)


def _time(found: Estimate) -> str:
    return f"{found.time_us:.3g} us" if found.time_us < 1000 else f"{found.time_us / 1e3:.3g} ms"


def _spent(found: Estimate) -> str:
    network, nvlink = found.network_bytes / 1e6, found.nvlink_bytes / 1e6
    return f"bound by {found.bound} ({network:.3g} MB over the network, {nvlink:.3g} MB inside the node)"
