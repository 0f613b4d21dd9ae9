"""A parcel to the ranks of a group: one all-to-all per tensor, all under way before any is waited for; differentiable.

The graph is made when the parcel has arrived, so that what is in flight belongs to nobody. Backward is the reverse
all-to-all. It always sends every tensor, whether or not this rank needs its gradient, because ranks may differ in that.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_comm.dispatcher import Parcel
from moe_comm.traffic import Leg, TrafficEntry, TrafficLedger, note_traffic, open_ledgers
from moe_parallel import Pending, all_to_all

Move = Callable[[Parcel], Pending[Parcel]]

_BACKWARD_OF: dict[Leg, Leg] = {
    "dispatch": "dispatch_backward",
    "gather": "gather_backward",
    "scatter": "scatter_backward",
    "combine": "combine_backward",
}


@dataclass(frozen=True, kw_only=True)
class Splits:
    """Who sends how much to whom.

    Attributes:
        group: the ranks.
        send_rows: rows to each rank, in the order of the group.
        receive_rows: rows from each rank.
    """

    group: ProcessGroup
    send_rows: tuple[int, ...]
    receive_rows: tuple[int, ...]

    def reversed(self) -> "Splits":
        """The way back."""
        return Splits(group=self.group, send_rows=self.receive_rows, receive_rows=self.send_rows)


def exchange(parcel: Parcel, splits: Splits, leg: Leg) -> Pending[Parcel]:
    """Send consecutive rows of the parcel to the ranks in order; what arrives is in the order of the ranks.

    The parcel must not be changed before the wait is over. `extra` is not carried.
    """
    sent = (parcel.rows,) if parcel.probs is None else (parcel.rows, parcel.probs)
    flights = _launch([tensor.detach() for tensor in sent], splits, leg)

    def land(_: Parcel) -> Parcel:
        rows, *probs = _exchange(splits, leg, flights, *sent)
        return Parcel(rows=rows, probs=probs[0] if probs else None)

    return Pending(parcel, [Flight(flight) for flight in flights], land)


def in_turn(parcel: Parcel, moves: Sequence[Move]) -> Pending[Parcel]:
    """Move a parcel several times: the first move starts now, each other when what is returned is waited for.

    Two parcels under way are waited for in the same order on every rank, so that their later moves meet.
    """
    if not moves:
        return Pending.completed(parcel)
    first, *others = moves
    flight = first(parcel)
    if not others:
        return flight
    return Pending(parcel, [Flight(flight, is_last=False)], lambda _: in_turn(flight.wait(), others).wait())


class Flight:
    """What is pending as work that another `Pending` waits for; it is not completed while more is to follow."""

    def __init__(self, pending: Pending[Any], *, is_last: bool = True) -> None:
        self._pending = pending
        self._is_last = is_last

    def wait(self) -> object:
        return self._pending.wait()

    def is_completed(self) -> bool:
        return self._is_last and self._pending.done()


def _launch(
    tensors: Sequence[Tensor], splits: Splits, leg: Leg, kept: tuple[TrafficLedger, ...] = ()
) -> list[Pending[Tensor]]:
    row_bytes = sum(tensor.shape[1:].numel() * tensor.itemsize for tensor in tensors)
    note_traffic(TrafficEntry.between(splits.group, leg, [rows * row_bytes for rows in splits.send_rows]), kept)
    return [
        all_to_all(tensor, splits.group, send_rows=splits.send_rows, receive_rows=splits.receive_rows)
        for tensor in tensors
    ]


class _Exchange(Function):
    """What has arrived, as a function of what was sent."""

    @staticmethod
    def forward(
        ctx: Any, splits: Splits, leg: Leg, flights: list[Pending[Tensor]], *sent: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.splits, ctx.leg, ctx.ledgers = splits, leg, open_ledgers()
        return tuple(flight.wait() for flight in flights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flights = _launch(grads, ctx.splits.reversed(), _BACKWARD_OF[ctx.leg], ctx.ledgers)
        return None, None, None, *(flight.wait() for flight in flights)


_exchange: Callable[..., tuple[Tensor, ...]] = _Exchange.apply
