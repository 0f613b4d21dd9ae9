"""`Topology`: which ranks share a machine or an NVLink domain. Pure data; torch is not imported."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from moe_parallel.errors import MoeParallelError


class LinkClass(Enum):
    """What connects two ranks, fastest first."""

    SELF = "self"
    NVLINK = "nvlink"
    NODE = "node"
    NETWORK = "network"


@dataclass(frozen=True)
class Topology:
    """The machines of a world.

    Attributes:
        node_of: number of the machine by rank.
        domain_of: number of the NVLink domain by rank; a domain may hold several machines (NVL72) or be one rank.
    """

    node_of: tuple[int, ...]
    domain_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.node_of or len(self.node_of) != len(self.domain_of):
            raise MoeParallelError(
                f"a topology names machine and NVLink domain of every rank: {len(self.node_of)} and "
                f"{len(self.domain_of)} were given"
            )

    @classmethod
    def regular(cls, world: int, *, ranks_per_node: int, ranks_per_domain: int | None = None) -> "Topology":
        """Machines of equal size with consecutive ranks; an NVLink domain is a machine unless said otherwise.

        Raises:
            MoeParallelError: a size is not at least 1, or does not divide the world.
        """
        if world < 1:
            raise MoeParallelError(f"a world has at least one rank, not {world}")
        per_domain = ranks_per_node if ranks_per_domain is None else ranks_per_domain
        for name, size in (("ranks_per_node", ranks_per_node), ("ranks_per_domain", per_domain)):
            if size < 1 or world % min(size, world):
                raise MoeParallelError(f"{name} = {size} does not divide the world of {world} ranks")
        return cls(
            tuple(rank // ranks_per_node for rank in range(world)), tuple(rank // per_domain for rank in range(world))
        )

    @classmethod
    def from_hosts(cls, hosts: Sequence[str], *, nvlink: bool = False) -> "Topology":
        """From the host name of every rank; with `nvlink` the ranks of a machine are one domain, else each its own."""
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        nodes = tuple(numbers[host] for host in hosts)
        return cls(nodes, nodes if nvlink else tuple(range(len(hosts))))

    @property
    def world(self) -> int:
        return len(self.node_of)

    @property
    def num_nodes(self) -> int:
        return len(set(self.node_of))

    def link(self, first: int, second: int) -> LinkClass:
        """The fastest connection between two ranks."""
        if first == second:
            return LinkClass.SELF
        if self.domain_of[first] == self.domain_of[second]:
            return LinkClass.NVLINK
        return LinkClass.NODE if self.node_of[first] == self.node_of[second] else LinkClass.NETWORK

    def on_node(self, ranks: Sequence[int], rank: int) -> tuple[int, ...]:
        """Those of `ranks` on the machine of `rank`, itself included if it is among them."""
        return tuple(other for other in ranks if self.node_of[other] == self.node_of[rank])

    def run_on_node(self, ranks: Sequence[int]) -> int:
        """How many consecutive members of a group share a machine, in the same way all through the group.

        It is the largest L for which every run of L members, cut from the first on, is on one machine: the greatest
        common divisor of the lengths of all stretches on one machine, so 1 where they are irregular.

        Args:
            ranks: the members in the order of the group.
        """
        return math.gcd(*(len(list(stretch)) for _, stretch in groupby(self.node_of[rank] for rank in ranks)))
