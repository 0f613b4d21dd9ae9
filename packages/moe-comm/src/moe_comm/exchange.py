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

_BACKWARD_OF: dict[Leg, Leg] = {"dispatch": "dispatch_backward", "combine": "combine_backward"}


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

    return Pending(parcel, [_Flight(flight) for flight in flights], land)


class _Flight:
    """A pending tensor as work that a `Pending` of several waits for."""

    def __init__(self, pending: Pending[Tensor]) -> None:
        self._pending = pending

    def wait(self) -> object:
        return self._pending.wait()

    def is_completed(self) -> bool:
        return self._pending.done()


def _launch(
    tensors: Sequence[Tensor], splits: Splits, leg: Leg, kept: tuple[TrafficLedger, ...] = ()
) -> list[Pending[Tensor]]:
    row_bytes = sum(tensor.shape[1:].numel() * tensor.itemsize for tensor in tensors)
    sent_bytes = tuple(rows * row_bytes for rows in splits.send_rows)
    note_traffic(TrafficEntry(leg=leg, rank=splits.group.rank(), sent_bytes=sent_bytes), kept)
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
