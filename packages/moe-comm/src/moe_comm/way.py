"""`Way`: the hops between a rank and the experts of its tokens, from the sizes that all ranks told.

Over the rail (same place in every node), then inside the node, then to those that share experts; levels of one rank are
left out.

Shape legend: B ranks of the block in rank order, which are p nodes, j ranks of a node, s ranks that share experts (s
fastest); l lanes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.hops import Hop, Lane, Reach
from moe_comm.landing import Arrivals
from moe_comm.metadata import Announced
from moe_comm.traffic import Leg
from moe_parallel import Groups


@dataclass(frozen=True, kw_only=True)
class Level:
    """Ranks between which rows travel at once.

    Attributes:
        group: None where there is one rank.
        size: of the group.
        rank: this one's place.
        there, back: names of the exchange and its return.
    """

    group: ProcessGroup | None
    size: int
    rank: int
    there: Leg
    back: Leg

    @classmethod
    def of(cls, groups: Groups, axis: str, there: Leg, back: Leg) -> "Level":
        """The axis of a mesh."""
        return cls(group=groups.group(axis), size=groups.size(axis), rank=groups.rank(axis), there=there, back=back)

    @classmethod
    def alone(cls) -> "Level":
        """One rank."""
        return cls(group=None, size=1, rank=0, there="dispatch", back="combine")


@dataclass(frozen=True, kw_only=True)
class Way:
    """The levels that rows travel over.

    Attributes:
        rail: ranks at the same place of every node.
        node: ranks of a node.
        sharers: ranks that share experts.
        local_experts: experts of a rank.
        copies_to_all: every token goes to every node.
        row_per_choice: every choice of a token has a row of its own.
        lanes: consecutive parts of the tokens, each with hops of its own.
    """

    rail: Level
    node: Level
    sharers: Level
    local_experts: int
    copies_to_all: bool
    row_per_choice: bool
    lanes: int

    @property
    def place(self) -> int:
        """Of this rank among those with other experts."""
        return self.rail.rank * self.node.size + self.node.rank

    @property
    def ranks(self) -> Reach:
        """Experts behind each of those."""
        return Reach(first_expert=0, experts=self.local_experts, members=self.rail.size * self.node.size)

    @property
    def nodes(self) -> Reach:
        """Experts behind each node."""
        return Reach(first_expert=0, experts=self.local_experts * self.node.size, members=self.rail.size)

    @property
    def asks_nodes(self) -> bool:
        """Whether the sizes of the first hop are rows to nodes."""
        return self.rail.size > 1 and not self.copies_to_all

    @property
    def _sources(self) -> tuple[int, int, int]:
        return self.rail.size, self.node.size, self.sharers.size

    def arrivals(self, told: Announced, lanes: tuple[Lane, ...], lane_size: int | None) -> Arrivals:
        """How many rows arrive from whom by these lanes, of so many tokens each where sizes are fixed."""
        counts_nsjp = self._by_source(told, lane_size).permute(3, 2, 1, 0)
        if self.node.size == 1:  # nobody mixed the rows of the nodes
            counts_nsjp = counts_nsjp.transpose(2, 3)
        total = sum(lane[-1].rows_arriving for lane in lanes)
        block = total // counts_nsjp[..., 0].numel() if lanes[0][0].is_fixed else None
        return Arrivals(counts_nsjp=counts_nsjp, total=total, block=block)

    @property
    def _gets_everything(self) -> bool:
        """Whether rows arrive here from whoever is asked, needed or not."""
        return self.node.size == 1 and (self.copies_to_all or self.rail.size == 1)

    def _by_source(self, told: Announced, lane_size: int | None) -> Tensor:
        """Rows that arrive here by (node, rank of the node, place of etp, lane), int64."""
        if self._gets_everything:
            return self._tokens_of_lanes(told, lane_size)
        return told.rows_BLW[..., self.place].reshape(*self._sources, self.lanes)

    def _tokens_of_lanes(self, told: Announced, lane_size: int | None) -> Tensor:
        """Tokens of each rank by lane, in the same dims; lanes of so many tokens, or of its share where None."""
        tokens = told.tokens_B.reshape(*self._sources, 1)
        size = ((tokens + self.lanes - 1) // self.lanes).clamp(min=1)
        if lane_size is not None:
            size = torch.full_like(size, lane_size)
        begin = torch.arange(self.lanes, device=tokens.device) * size
        return (tokens - begin).clamp(min=0).minimum(size)

    def exact_lanes(self, told: Announced) -> tuple[Lane, ...]:
        """The hops with the sizes that all ranks told; `told` is on the host."""
        p, j, s = self.rail.rank, self.node.rank, self.sharers.rank
        rows_pjslpj = told.rows_BLW.reshape(*self._sources, self.lanes, self.rail.size, self.node.size)
        nodes_pjslp = told.rows_BLN.reshape(*self._sources, *told.rows_BLN.shape[1:])
        tokens_pjsl = self._tokens_of_lanes(told, None)
        arriving_pjsl = self._by_source(told, None)
        lanes = []
        for lane in range(self.lanes):
            sizes: list[tuple[Tensor, Tensor]] = []
            if self.rail.size > 1 and self.copies_to_all:
                sizes.append((tokens_pjsl[p, j, s, lane].expand(self.rail.size), tokens_pjsl[:, j, s, lane]))
            elif self.rail.size > 1:
                sizes.append((nodes_pjslp[p, j, s, lane], nodes_pjslp[:, j, s, lane, p]))
            if self.node.size > 1:
                to_here = rows_pjslpj[:, :, s, lane, p, j].sum(0)
                sizes.append((rows_pjslpj[:, j, s, lane, p].sum(0), to_here))
            if self.sharers.size > 1:
                arrived_s = arriving_pjsl[..., lane].sum((0, 1))
                sizes.append((arrived_s[s].expand(self.sharers.size), arrived_s))
            lanes.append(
                self._lane([(tuple(send.tolist()), tuple(get.tolist())) for send, get in sizes], is_fixed=False)
            )
        return tuple(lanes) if lanes[0] else ()

    def fixed_lanes(self, lane_size: int, num_choices: int) -> tuple[Lane, ...]:
        """The hops with room for the worst case of so many tokens."""
        sizes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        rows = lane_size
        for level in self._levels():
            if self.row_per_choice and not sizes and self._reach(level) is not None:
                rows *= num_choices
            each = (rows,) * level.size
            sizes.append((each, each))
            rows *= level.size
        lane = self._lane(sizes, is_fixed=True)
        return (lane,) * self.lanes if lane else ()

    def _levels(self) -> list[Level]:
        return [level for level in (self.rail, self.node, self.sharers) if level.size > 1]

    def _lane(self, sizes: list[tuple[tuple[int, ...], tuple[int, ...]]], *, is_fixed: bool) -> Lane:
        return tuple(
            Hop(
                group=level.group,
                there=level.there,
                back=level.back,
                reach=self._reach(level),
                send_rows=send_rows,
                receive_rows=receive_rows,
                is_fixed=is_fixed,
            )
            for level, (send_rows, receive_rows) in zip(self._levels(), sizes, strict=True)
            if level.group is not None
        )

    def _reach(self, level: Level) -> Reach | None:
        if level is self.sharers or (level is self.rail and self.copies_to_all):
            return None
        if level is self.rail:
            return self.nodes
        first = self.rail.rank * self.node.size * self.local_experts
        return Reach(first_expert=first, experts=self.local_experts, members=self.node.size)
