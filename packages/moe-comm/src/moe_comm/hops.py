"""A hop: rows from each member of a group to the members whose experts they need, and a lane of hops one after another.

Shape legend: C rows, K choices that ride with each, M members of a group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.traffic import Leg
from moe_kernels.permute import RowMap, row_map


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Which experts are behind each member of a group: consecutive ones, equally many each.

    Attributes:
        first_expert: the first one behind the first member.
        experts: behind each member.
        members: M.
    """

    first_expert: int
    experts: int
    members: int

    def member_of(self, ids_CK: Tensor) -> Tensor:
        """Member of each choice, [C, K]; -1 for choices behind none of them."""
        member_CK = torch.div(ids_CK - self.first_expert, self.experts, rounding_mode="floor")
        return member_CK.masked_fill((ids_CK < 0) | (member_CK < 0) | (member_CK >= self.members), -1)

    def members_once(self, ids_CK: Tensor) -> Tensor:
        """The different members of each row's choices in ascending order, [C, K], -1 in the places that are left."""
        member_CK = self.member_of(ids_CK).sort(1).values
        again_CK = member_CK[:, 1:] == member_CK[:, :-1]
        return torch.cat((member_CK[:, :1], member_CK[:, 1:].masked_fill(again_CK, -1)), 1)


@dataclass(frozen=True, kw_only=True)
class Hop:
    """One exchange of a lane, and where its rows come from.

    Attributes:
        group: the members.
        there, back: names of the exchange and of its return.
        reach: what is behind each member; None sends every row to all of them.
        send_rows, receive_rows: rows to and from each member; those at hand to all of them with `reach` None.
        is_fixed: the sizes are those of the worst case, and what is not needed of them is padding.
    """

    group: ProcessGroup
    there: Leg
    back: Leg
    reach: Reach | None
    send_rows: tuple[int, ...]
    receive_rows: tuple[int, ...]
    is_fixed: bool = False

    @property
    def is_gather(self) -> bool:
        """Whether all members send all of their rows to all, and equally many."""
        return self.reach is None and len(set(self.receive_rows)) == 1

    @property
    def rows_at_hand(self) -> int:
        """Rows that are sent, each counted once for every member it goes to; with `reach` None, once."""
        return sum(self.send_rows) if self.reach is not None else self.send_rows[0]

    @property
    def rows_arriving(self) -> int:
        """Rows that arrive."""
        return sum(self.receive_rows)

    def fan_out(self, ids_CK: Tensor) -> RowMap | None:
        """Which of the rows at hand goes to which member, sorted by (member, row); None sends all to all.

        No host synchronisation.
        """
        if self.reach is None:
            return None
        members_CK = self.reach.members_once(ids_CK.to(torch.int64))
        if self.is_fixed:
            return row_map(members_CK, self.reach.members, rows_per_expert=self.send_rows[0])
        return row_map(members_CK, self.reach.members, num_rows=sum(self.send_rows))


Lane = tuple[Hop, ...]


def ids_of_rows(ids_TK: Tensor, rows: RowMap) -> Tensor:
    """The choices that ride with each row of a map of these tokens, [C, K]; -1 with padding rows."""
    if rows.num_tokens == 0:
        return ids_TK.new_full((rows.num_rows, ids_TK.shape[1]), -1)
    ids_CK = ids_TK.index_select(0, rows.token_R)
    return ids_CK.masked_fill_(rows.choice_R[:, None] < 0, -1) if rows.is_padded else ids_CK
