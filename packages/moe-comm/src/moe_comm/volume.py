"""How many rows an exchange is expected to move: closed formulas over random routing. Torch is not imported.

A token hits a part of the experts, such as those of one rank or of one node, if one of its choices is in it. How often
it does decides what can be saved by sending a token once to each part, instead of once for each choice.

Symbols: W ranks, L of them on a node, N = W / L nodes, E experts in the order of the ranks, K different choices of a
token. All rows are per token of one rank, and hold for the way there, the way back and both backward passes alike.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import comb
from typing import Literal

from moe_comm.errors import MoeCommError

# `local` is one rank; `hybrid_rail_allgather` sends every token to every node, and inside the nodes what `hybrid` does.
Algorithm = Literal["local", "allgather", "alltoall_per_expert", "alltoall_per_rank", "hybrid", "hybrid_rail_allgather"]


@dataclass(frozen=True, kw_only=True)
class RandomRouting:
    """Tokens that choose K different experts at random, each set of them equally often.

    With groups a token first chooses `chosen_groups` of `groups` runs of experts, and its experts in these.

    Attributes:
        num_experts: E.
        top_k: K.
        groups: a divisor of E.
        chosen_groups: of them; they must have K experts.

    Raises:
        MoeCommError: there are no such choices.
    """

    num_experts: int
    top_k: int
    groups: int = 1
    chosen_groups: int = 1

    def __post_init__(self) -> None:
        if self.groups < 1 or self.num_experts < 1 or self.num_experts % self.groups:
            raise MoeCommError(f"{self.num_experts} experts cannot be cut into groups = {self.groups} of equal size")
        if not 1 <= self.chosen_groups <= self.groups:
            raise MoeCommError(f"chosen_groups = {self.chosen_groups} is not between 1 and groups = {self.groups}")
        if not 0 <= self.top_k <= self.eligible:
            raise MoeCommError(
                f"top_k = {self.top_k} different experts cannot be chosen among {self.eligible} "
                f"({self.chosen_groups} of {self.groups} groups of {self.num_experts // self.groups})"
            )

    @property
    def eligible(self) -> int:
        """Experts in the chosen groups."""
        return self.num_experts // self.groups * self.chosen_groups


@lru_cache(maxsize=256)
def hit_probability(routing: RandomRouting, parts: int) -> float:
    """Probability that a token hits one of so many equal parts of the experts, on average over the parts.

    Without groups it is 1 - C(E - E/parts, K) / C(E, K). With groups the experts of a part that are eligible depend on
    which groups are chosen, and the formula is averaged over them. Parts need not be made of whole groups, nor groups
    of whole parts.

    Raises:
        MoeCommError: the experts cannot be cut into so many parts.
    """
    if parts < 1 or routing.num_experts % parts:
        raise MoeCommError(f"{routing.num_experts} experts cannot be cut into {parts} parts of equal size")
    size, per_group = routing.num_experts // parts, routing.num_experts // routing.groups
    misses = hits = 0
    for part in range(parts):
        # Experts that the part shares with each group it touches.
        first, end = part * size, (part + 1) * size
        touched = range(first // per_group, (end - 1) // per_group + 1)
        shared = [min(end, (group + 1) * per_group) - max(first, group * per_group) for group in touched]
        for eligible, ways in _eligible_here(routing, tuple(shared)).items():
            misses += ways * comb(routing.eligible - eligible, routing.top_k)
            hits += ways * comb(routing.eligible, routing.top_k)
    return 1 - misses / hits


def _eligible_here(routing: RandomRouting, shared: tuple[int, ...]) -> Counter[int]:
    """Ways to choose the groups, by how many experts of a part they make eligible."""
    ways: Counter[tuple[int, int]] = Counter({(0, 0): 1})  # by groups chosen among those that the part touches, experts
    for experts in shared:
        ways += Counter({(chosen + 1, total + experts): n for (chosen, total), n in ways.items()})
    found: Counter[int] = Counter()
    for (chosen, total), n in ways.items():
        if chosen <= routing.chosen_groups:
            found[total] += n * comb(routing.groups - len(shared), routing.chosen_groups - chosen)
    return found


@dataclass(frozen=True, kw_only=True)
class ExpectedRows:
    """Rows that leave a rank per token of it, on one way.

    Attributes:
        network: to other nodes.
        nvlink: to other ranks of the node.
    """

    network: float
    nvlink: float

    @property
    def total(self) -> float:
        """Rows to other ranks."""
        return self.network + self.nvlink


def expected_rows(
    algorithm: Algorithm,
    routing: RandomRouting,
    *,
    world: int,
    ranks_per_node: int,
    etp: int = 1,
    fixed: bool = False,
) -> ExpectedRows:
    """Rows over the network and inside a node.

    Args:
        world: W, the size of the axis `ep`.
        ranks_per_node: L, those of them on one node; for `hybrid` consecutive ones.
        etp: ranks that share an expert, all on one node; each row that arrives goes to the others of them as well.
        fixed: sizes are those of the worst case, in which every token (`per_expert`: every choice) goes everywhere.

    Raises:
        MoeCommError: nodes do not divide the ranks, ranks do not divide the experts, or `local` has several ranks.
    """
    _check(algorithm, world, ranks_per_node)
    nodes, beside = world // ranks_per_node, ranks_per_node - 1
    p_node, p_rank = (max(float(fixed), hit_probability(routing, parts)) for parts in (nodes, world))
    choices = routing.top_k * (world if fixed else 1)
    per_rank_here = nodes * beside * p_rank  # from the node's own rank on every rail to the ranks beside it
    network, nvlink = {
        "local": (0.0, 0.0),
        "allgather": (world - ranks_per_node, beside),
        "alltoall_per_expert": (choices * (1 - 1 / nodes), choices * beside / world),
        "alltoall_per_rank": ((world - ranks_per_node) * p_rank, beside * p_rank),
        "hybrid": ((nodes - 1) * p_node, per_rank_here),
        "hybrid_rail_allgather": (nodes - 1, per_rank_here),
    }[algorithm]
    peak = peak_rows(algorithm, routing, world=world, ranks_per_node=ranks_per_node, worst=fixed)
    arriving = choices if algorithm == "alltoall_per_expert" else peak.ranks
    return ExpectedRows(network=network, nvlink=nvlink + (etp - 1) * arriving)


@dataclass(frozen=True, kw_only=True)
class PeakRows:
    """Rows that a rank receives on a stage, per token of a rank.

    Attributes:
        rail: from the other nodes and its own, before they are forwarded; 0 where there is one stage.
        ranks: from the ranks of its node, or from all ranks where there is one stage.
        experts: sorted by expert, one for each choice of an expert here.
    """

    rail: float
    ranks: float
    experts: float

    @property
    def most(self) -> float:
        """The largest stage."""
        return max(self.rail, self.ranks, self.experts)


def peak_rows(
    algorithm: Algorithm, routing: RandomRouting, *, world: int, ranks_per_node: int, worst: bool = False
) -> PeakRows:
    """Rows of each stage: those expected, or the most that a routing can bring about, all tokens to one rank.

    Raises:
        MoeCommError: as `expected_rows`.
    """
    _check(algorithm, world, ranks_per_node)
    nodes, top_k = world // ranks_per_node, routing.top_k
    p: Callable[[RandomRouting, int], float] = _certainly if worst else hit_probability
    many = world * min(top_k, routing.num_experts // world) if worst else top_k
    rail = {"hybrid": nodes * p(routing, nodes), "hybrid_rail_allgather": float(nodes)}.get(algorithm, 0.0)
    ranks = {"local": 1.0, "allgather": float(world), "alltoall_per_expert": float(many)}
    return PeakRows(rail=rail, ranks=ranks.get(algorithm, world * p(routing, world)), experts=many)


def _certainly(_: RandomRouting, parts: int) -> float:
    return 1.0


def _check(algorithm: Algorithm, world: int, ranks_per_node: int) -> None:
    if world < 1 or ranks_per_node < 1 or world % ranks_per_node:
        raise MoeCommError(f"ranks_per_node = {ranks_per_node} does not divide the group of {world} ranks")
    if algorithm == "local" and world > 1:
        raise MoeCommError(f"the algorithm local is for one rank, not for {world}")
