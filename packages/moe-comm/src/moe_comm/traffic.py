"""Bytes that dispatchers send: a ledger of what was sent, and formulas of what an all-to-all has to send.

    with record_traffic() as ledger:
        ...
    ledger.bytes_by_link(topology)

Shape legend: T tokens of one rank, K choices per token, D features, W expert-parallel ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_comm.errors import MoeCommError
from moe_kernels import internal_dtype
from moe_parallel import LinkClass, Topology

# In the order of a layer and its backward. `gather` and `scatter` are between the ranks that share experts (`etp`).
Leg = Literal[
    "metadata",
    "dispatch",
    "gather",
    "scatter",
    "combine",
    "combine_backward",
    "scatter_backward",
    "gather_backward",
    "dispatch_backward",
]

# Legs on which rows travel towards experts; on the others they return.
_THERE = ("dispatch", "gather", "combine_backward", "scatter_backward")
_WITH_PROBABILITIES = ("dispatch", "gather", "gather_backward", "dispatch_backward")

METADATA_ITEM_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class TrafficEntry:
    """What one rank sent in one exchange.

    Attributes:
        leg: which exchange of a layer it was.
        rank: place of the sender in the group.
        members: ranks in the world of the group's members, in the order of the group.
        sent_bytes: by receiver, in the order of the group; the sender's own part stays where it is.
    """

    leg: Leg
    rank: int
    members: tuple[int, ...]
    sent_bytes: tuple[int, ...]

    @classmethod
    def between(cls, group: ProcessGroup, leg: Leg, sent_bytes: Sequence[int]) -> "TrafficEntry":
        """What this rank sends in `group`."""
        members = tuple(dist.get_process_group_ranks(group))
        return cls(leg=leg, rank=group.rank(), members=members, sent_bytes=tuple(sent_bytes))

    @property
    def leaving_bytes(self) -> int:
        """Bytes to other ranks."""
        return sum(self.sent_bytes) - self.sent_bytes[self.rank]


class TrafficLedger:
    """The exchanges of one rank while the ledger was open, in order.

    Attributes:
        entries: one per exchange that communicated.
    """

    def __init__(self) -> None:
        self.entries: list[TrafficEntry] = []
        self._is_open = True

    def leaving_bytes(self, leg: Leg | None = None) -> int:
        """Bytes to other ranks, of one leg or of all."""
        return sum(entry.leaving_bytes for entry in self.entries if leg is None or entry.leg == leg)

    def bytes_by_link(self, topology: Topology, leg: Leg | None = None) -> dict[LinkClass, int]:
        """Bytes by what they travel over; `LinkClass.SELF` is what did not leave its rank.

        Args:
            topology: of the world.
            leg: count this leg alone.
        """
        total = dict.fromkeys(LinkClass, 0)
        for entry in self.entries:
            if leg is not None and entry.leg != leg:
                continue
            for receiver, sent in zip(entry.members, entry.sent_bytes, strict=True):
                total[topology.link(entry.members[entry.rank], receiver)] += sent
        return total


_open_here: ContextVar[tuple[TrafficLedger, ...]] = ContextVar("moe_comm_open_ledgers", default=())


@contextmanager
def record_traffic() -> Iterator[TrafficLedger]:
    """Record what the calling thread's rank sends inside the context, backward included.

    Dispatchers call `note_traffic`; those that do not leave no trace. Where backward runs in threads of its own (CUDA),
    its exchanges are noted in the ledgers that were open in the forward pass and still are.
    """
    ledger = TrafficLedger()
    token = _open_here.set((*_open_here.get(), ledger))
    try:
        yield ledger
    finally:
        _open_here.reset(token)
        ledger._is_open = False


def open_ledgers() -> tuple[TrafficLedger, ...]:
    """The ledgers that are open in this thread; a forward pass keeps them for its backward."""
    return _open_here.get()


def note_traffic(entry: TrafficEntry, kept: tuple[TrafficLedger, ...] = ()) -> None:
    """Enter an exchange in every open ledger of this thread; for dispatchers.

    Args:
        entry: what this rank sends.
        kept: in backward, what `open_ledgers` said in the forward pass.
    """
    for ledger in dict.fromkeys((*_open_here.get(), *kept)):
        if ledger._is_open:
            ledger.entries.append(entry)


def rows_by_rank(ids_TK: Tensor, num_experts: int, world: int) -> tuple[int, ...]:
    """Rows that an all-to-all with one row per (token, expert) sends to each of W ranks, for one rank's routing."""
    chosen = ids_TK[ids_TK >= 0] // (num_experts // world)
    return tuple(torch.bincount(chosen, minlength=world).tolist())


def bytes_per_row(leg: Leg, hidden: int, dtype: torch.dtype) -> int:
    """Bytes of one row: the features, and on the legs of dispatch its probability in the internal dtype."""
    if leg == "metadata":
        raise MoeCommError("metadata is not sent in rows; `metadata_bytes` tells its size")
    features = hidden * dtype.itemsize
    return features + internal_dtype(dtype).itemsize if leg in _WITH_PROBABILITIES else features


def shared_rows(rows_by_sender: Sequence[Sequence[int]], place: int, etp: int) -> list[list[int]]:
    """Rows that each of the `etp` ranks at one place of the expert-parallel axis sends to each on the leg `gather`.

    Args:
        rows_by_sender: `rows_by_rank` of every rank's routing, all `etp * W` of them in rank order (etp fastest). The
            rows of a leg of `dispatch` are every etp-th of them, `rows_by_sender[shard::etp]`.
        place: of the expert-parallel axis.
        etp: ranks that share an expert.
    """
    return [[sum(rows[place] for rows in rows_by_sender[shard::etp])] * etp for shard in range(etp)]


def alltoall_bytes(
    leg: Leg, rank: int, rows_by_sender: Sequence[Sequence[int]], *, hidden: int, dtype: torch.dtype
) -> tuple[int, ...]:
    """Bytes that a rank sends to each rank of a group on one leg with one row per (token, expert).

    Args:
        leg: any but the metadata. Rows travel to their experts in `dispatch` and `gather` and, as gradients, in
            `combine_backward` and `scatter_backward`, and return in the other four.
        rank: place of the sender in the group.
        rows_by_sender: `rows_by_rank` of every rank's routing; for the legs between the ranks that share experts,
            `shared_rows`.
        hidden: D.
        dtype: of the rows.
    """
    rows = rows_by_sender[rank] if leg in _THERE else [row[rank] for row in rows_by_sender]
    return tuple(count * bytes_per_row(leg, hidden, dtype) for count in rows)


def metadata_bytes(num_experts: int, world: int) -> int:
    """Bytes that the all-to-all dispatcher's plan sends to each rank: a count per expert there, and a health word.

    `world` is the number of expert-parallel ranks; all `etp` ranks at a place get the same.
    """
    return (num_experts // world + 1) * METADATA_ITEM_BYTES


@dataclass(frozen=True, kw_only=True)
class ExpectedRows:
    """Rows that leave a rank per token of it under uniform routing.

    Attributes:
        network: to other machines.
        nvlink: to other ranks of the same machine.
    """

    network: float
    nvlink: float

    @property
    def total(self) -> float:
        """K (1 - 1/W)."""
        return self.network + self.nvlink


def expected_rows(top_k: int, *, world: int, ranks_per_node: int) -> ExpectedRows:
    """K (1 - 1/N) rows over the network and K (L - 1)/W inside a machine, for N machines of L = W/N ranks.

    It is what one row per (token, expert) costs on the way there; the way back and both backward legs cost the same.

    Raises:
        MoeCommError: machines do not divide the group.
    """
    if ranks_per_node < 1 or world % ranks_per_node:
        raise MoeCommError(f"ranks_per_node = {ranks_per_node} does not divide the group of {world} ranks")
    return ExpectedRows(
        network=top_k * (1 - ranks_per_node / world),
        nvlink=top_k * (ranks_per_node - 1) / world,
    )
