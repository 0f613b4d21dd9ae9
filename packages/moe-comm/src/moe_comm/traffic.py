"""The ledger: what the dispatchers of one rank send, what they wait for, and what they hold meanwhile.

    with record_traffic() as ledger:
        ...
    ledger.bytes_by_link(topology)

`counts` has the formulas that it must equal.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import add
from typing import Literal

import torch.distributed as dist
from torch.distributed import ProcessGroup

from moe_parallel import LinkClass, Topology

# In the order of a layer and its backward. `dispatch` and `combine` are between all ranks of `ep`; two levels have legs
# between nodes (`rail`) and inside a node (`node`). `gather` and `scatter` are between the ranks that share experts.
Leg = Literal[
    "metadata",
    "dispatch",
    "dispatch_rail",
    "dispatch_node",
    "gather",
    "scatter",
    "combine_node",
    "combine_rail",
    "combine",
    "combine_backward",
    "combine_rail_backward",
    "combine_node_backward",
    "scatter_backward",
    "gather_backward",
    "dispatch_node_backward",
    "dispatch_rail_backward",
    "dispatch_backward",
]

BACKWARD_OF: dict[Leg, Leg] = {
    "dispatch": "dispatch_backward",
    "dispatch_rail": "dispatch_rail_backward",
    "dispatch_node": "dispatch_node_backward",
    "gather": "gather_backward",
    "scatter": "scatter_backward",
    "combine_node": "combine_node_backward",
    "combine_rail": "combine_rail_backward",
    "combine": "combine_backward",
}


@dataclass(frozen=True, kw_only=True)
class TrafficEntry:
    """What one rank sent in one exchange.

    Attributes:
        leg: which exchange of a layer it was.
        rank: place of the sender in the group.
        members: ranks in the world of the group's members, in the order of the group.
        sent_bytes: by receiver, in the order of the group; the sender's own part stays where it is.
        collectives: how many it took, one for each tensor.
    """

    leg: Leg
    rank: int
    members: tuple[int, ...]
    sent_bytes: tuple[int, ...]
    collectives: int = 1

    @classmethod
    def between(
        cls, group: ProcessGroup, leg: Leg, sent_bytes: Sequence[int], *, collectives: int = 1
    ) -> "TrafficEntry":
        """What this rank sends in `group`."""
        members = tuple(dist.get_process_group_ranks(group))
        return cls(leg=leg, rank=group.rank(), members=members, sent_bytes=tuple(sent_bytes), collectives=collectives)

    @property
    def leaving_bytes(self) -> int:
        """Bytes to other ranks."""
        return sum(self.sent_bytes) - self.sent_bytes[self.rank]


class TrafficLedger:
    """The exchanges of one rank while the ledger was open, in order.

    Attributes:
        entries: one per exchange that communicated.
        host_syncs: how often the host waited for a device's numbers.
        peak_buffer_bytes: the most that the exchanges of one direction that were under way at once send and receive;
            what an earlier hop sent, and tokens and rows of the layer itself, not counted.
    """

    def __init__(self) -> None:
        self.entries: list[TrafficEntry] = []
        self.host_syncs = 0
        self.peak_buffer_bytes = 0
        self._is_open = True

    def leaving_bytes(self, leg: Leg | None = None) -> int:
        """Bytes to other ranks, of one leg or of all."""
        return sum(entry.leaving_bytes for entry in self._of(leg))

    def collectives(self, leg: Leg | None = None) -> int:
        """Collectives of one leg or of all."""
        return sum(entry.collectives for entry in self._of(leg))

    def bytes_by_link(self, topology: Topology, leg: Leg | None = None) -> dict[LinkClass, int]:
        """Bytes by what they travel over; `LinkClass.SELF` is what did not leave its rank.

        Args:
            topology: of the world.
            leg: count this leg alone.
        """
        # Of the thousands of exchanges of a step most are in the same few groups.
        by_group: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for entry in self._of(leg):
            sent = by_group.get((entry.rank, entry.members))
            by_group[entry.rank, entry.members] = list(map(add, sent, entry.sent_bytes) if sent else entry.sent_bytes)
        total = dict.fromkeys(LinkClass, 0)
        for (rank, members), sent in by_group.items():
            for receiver, sent_bytes in zip(members, sent, strict=True):
                total[topology.link(members[rank], receiver)] += sent_bytes
        return total

    def _of(self, leg: Leg | None) -> list[TrafficEntry]:
        return self.entries if leg is None else [entry for entry in self.entries if entry.leg == leg]


_open_here: ContextVar[tuple[TrafficLedger, ...]] = ContextVar("moe_comm_open_ledgers", default=())


@contextmanager
def record_traffic() -> Iterator[TrafficLedger]:
    """Record what the calling thread's rank sends inside the context, backward included.

    Dispatchers call `note_traffic`; those that do not leave no trace. Where backward runs in threads of its own (CUDA),
    its exchanges, and those of a forward pass repeated there, are noted in the ledgers that were open in the forward
    pass, or when the plan was made, and still are.
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
    for ledger in _listening(kept):
        ledger.entries.append(entry)


def note_host_sync(kept: tuple[TrafficLedger, ...] = ()) -> None:
    """Enter that the host waits for numbers of the device; for dispatchers, on CPUs as well.

    Args:
        kept: in backward, what `open_ledgers` said in the forward pass.
    """
    for ledger in _listening(kept):
        ledger.host_syncs += 1


def note_buffer(held_bytes: int, kept: tuple[TrafficLedger, ...] = ()) -> None:
    """Enter what a dispatcher holds at this moment to send and to receive; for dispatchers.

    Args:
        held_bytes: of all exchanges that are under way at once.
        kept: in backward, what `open_ledgers` said in the forward pass.
    """
    for ledger in _listening(kept):
        ledger.peak_buffer_bytes = max(ledger.peak_buffer_bytes, held_bytes)


def _listening(kept: tuple[TrafficLedger, ...]) -> list[TrafficLedger]:
    """Each open ledger once."""
    return [ledger for ledger in dict.fromkeys((*_open_here.get(), *kept)) if ledger._is_open]
