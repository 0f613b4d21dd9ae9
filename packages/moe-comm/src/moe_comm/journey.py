"""A parcel through lanes of hops and back: all exchanges of one direction as one differentiable function.

There every row is copied to the members that need it, hop by hop; back the copies are added up, in the order of the
members, in the internal dtype, rounded once per hop. Each is the other's backward. The hops of one lane follow each
other; those of different lanes overlap: while the second hop of a lane is under way, so is the first of the next.

The graph is made when the parcel has arrived, so that what is in flight belongs to nobody. Backward always sends every
tensor, whether or not this rank needs its gradient, because ranks may differ in that.

Shape legend: C rows, K choices that ride with each, D features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moe_comm.dispatcher import Parcel
from moe_comm.hops import Hop, Lane, ids_of_rows
from moe_comm.traffic import (
    BACKWARD_OF,
    Leg,
    TrafficEntry,
    TrafficLedger,
    note_buffer,
    note_traffic,
    open_ledgers,
)
from moe_kernels.permute import RowMap, permute, unpermute
from moe_parallel import Pending, add_up, all_gather, all_to_all


class Freight(NamedTuple):
    """What travels together.

    Attributes:
        rows: [C, D].
        probs: [C, K] in the internal dtype, probabilities or their gradients; None on the way back of outputs.
        ids: int32 [C, K], global expert ids, -1 for none; None where they are known at the other end.
    """

    rows: Tensor
    probs: Tensor | None = None
    ids: Tensor | None = None

    def cut(self, sizes: Sequence[int]) -> "list[Freight]":
        """Consecutive parts."""
        fields = [[None] * len(sizes) if tensor is None else torch.split(tensor, list(sizes)) for tensor in self]
        return [Freight(*parts) for parts in zip(*fields, strict=True)]

    @classmethod
    def join(cls, parts: "Sequence[Freight]") -> "Freight":
        """Undo `cut`."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(None if tensors[0] is None else torch.cat(tensors) for tensors in zip(*parts, strict=True)))  # type: ignore[arg-type]


@dataclass
class Journey:
    """The lanes of one plan, and what is known of them once something has travelled.

    Attributes:
        lanes: each with equally many hops; their rows are one after another in a parcel.
        fan_out: by lane and hop, which of the rows that arrived from the hop before goes to whom; None where all go to
            all. That of the first hop is the plan's own, and None here. Filled when ids arrive for the first time.
        ledgers: those that were open when the plan was made. A forward pass that is repeated in a thread of autograd,
            to which they are invisible, is noted in them.
    """

    lanes: tuple[Lane, ...]
    fan_out: list[list[RowMap | None]] = field(init=False)
    ledgers: tuple[TrafficLedger, ...] = field(default_factory=open_ledgers)

    def __post_init__(self) -> None:
        self.fan_out = [[None] * len(lane) for lane in self.lanes]

    @property
    def hops(self) -> int:
        """Hops of every lane."""
        return len(self.lanes[0])

    def there(self, parcel: Parcel, landed: Callable[[Tensor], None]) -> Pending[Parcel]:
        """Send a parcel to where its experts are.

        Args:
            parcel: rows [C, D] and probabilities [C, K]; the ids of its choices in `extra["ids"]` the first time.
            landed: gets the ids that arrive, the first time, before the wait is over.
        """
        assert parcel.probs is not None
        sent = Freight(parcel.rows.detach(), parcel.probs.detach(), parcel.extra.get("ids"))
        pending = _spread(self, sent, backward=False)

        def land(_: Parcel) -> Parcel:
            rows, probs = _there(self, pending, landed, parcel.rows, parcel.probs)
            return Parcel(rows=rows, probs=probs)

        return Pending(parcel, [Flight(pending)], land)

    def back(self, parcel: Parcel) -> Pending[Parcel]:
        """Bring rows back to where they came from; those of one row of the parcel that was sent are added up."""
        pending = _collect(self, Freight(parcel.rows.detach()), backward=False)
        return Pending(parcel, [Flight(pending)], lambda _: Parcel(rows=_back(self, pending, parcel.rows)))

    def there_backward(self, grad_rows: Tensor, grad_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of what was sent from those of what arrived; not differentiable."""
        home = _collect(self, Freight(grad_rows, grad_probs), backward=True).wait()
        assert home.probs is not None
        return home.rows, home.probs

    def back_backward(self, grad_rows: Tensor) -> Tensor:
        """Gradients of what was brought back, from those of what came; not differentiable."""
        return _spread(self, Freight(grad_rows), backward=True).wait().rows


class Flight:
    """What is pending as work that another `Pending` waits for."""

    def __init__(self, pending: Pending[Any]) -> None:
        self._pending = pending

    def wait(self) -> object:
        return self._pending.wait()

    def is_completed(self) -> bool:
        return self._pending.done()


class _MoreToCome:
    """Work of which a part has not started: it starts as the wait goes on, and no sooner is it completed."""

    def wait(self) -> object:
        return None

    def is_completed(self) -> bool:
        return False


@dataclass(frozen=True)
class _Account:
    """What one direction tells the ledgers.

    Attributes:
        backward: whether it is the backward of the other direction.
        kept: ledgers to tell beside those that are open here.
        held_bytes: by lane, what its hop under way sends and receives.
    """

    backward: bool
    kept: tuple[TrafficLedger, ...]
    held_bytes: dict[int, int] = field(default_factory=dict)

    def enter(
        self, lane: int, hop: Hop, leg: Leg, rows_to: Sequence[int], rows: int, tensors: Sequence[Tensor]
    ) -> None:
        """The start of a hop.

        Args:
            rows_to: rows to each member.
            rows: all that are held, to be sent and to be received.
        """
        row_bytes = sum(tensor.shape[1] * tensor.itemsize for tensor in tensors)
        sent_bytes = [count * row_bytes for count in rows_to]
        note_traffic(TrafficEntry.between(hop.group, leg, sent_bytes, collectives=len(tensors)), self.kept)
        self.held_bytes[lane] = rows * row_bytes
        note_buffer(sum(self.held_bytes.values()), self.kept)


def _spread(
    journey: Journey, freight: Freight, *, backward: bool, kept: tuple[TrafficLedger, ...] = ()
) -> Pending[Freight]:
    """All lanes there; the first hop of each starts now, the others when this is waited for."""
    account = _Account(backward, (*journey.ledgers, *kept))

    def start(lane: int, depth: int, at_hand: Freight) -> Pending[Freight]:
        return _start_there(lane, journey.lanes[lane][depth], at_hand, account)

    def turn(lane: int, depth: int, arrived: Freight) -> Freight:
        if arrived.ids is not None:
            journey.fan_out[lane][depth] = journey.lanes[lane][depth].fan_out(arrived.ids)
        return _copied(arrived, journey.fan_out[lane][depth])

    parts = freight.cut([lane[0].rows_at_hand for lane in journey.lanes])
    first = [start(lane, 0, part) for lane, part in enumerate(parts)]
    return _in_turn(freight, first, range(1, journey.hops), turn, start)


def _collect(
    journey: Journey, freight: Freight, *, backward: bool, kept: tuple[TrafficLedger, ...] = ()
) -> Pending[Freight]:
    """All lanes back; the last hop of each starts now, the others when this is waited for."""
    account = _Account(backward, (*journey.ledgers, *kept))

    def start(lane: int, depth: int, at_hand: Freight) -> Pending[Freight]:
        return _start_back(lane, journey.lanes[lane][depth], at_hand, account)

    def turn(lane: int, depth: int, arrived: Freight) -> Freight:
        return _added_up(arrived, journey.fan_out[lane][depth + 1])

    parts = freight.cut([lane[-1].rows_arriving for lane in journey.lanes])
    last = [start(lane, journey.hops - 1, part) for lane, part in enumerate(parts)]
    return _in_turn(freight, last, range(journey.hops - 2, -1, -1), turn, start)


def _in_turn(
    value: Freight,
    flights: list[Pending[Freight]],
    depths: Sequence[int],
    turn: Callable[[int, int, Freight], Freight],
    start: Callable[[int, int, Freight], Pending[Freight]],
) -> Pending[Freight]:
    """Wait for the lanes one after another, and start the next hop of each, with what `turn` makes of the arrived."""

    def finish(_: Freight) -> Freight:
        for depth in depths:
            for lane in range(len(flights)):
                # Taken off the list, so that what arrived is gone before there is room for what the next hop brings.
                flights.append(start(lane, depth, turn(lane, depth, flights.pop(0).wait())))
        return Freight.join([flight.wait() for flight in flights])

    return Pending(value, [_MoreToCome()] if depths else [Flight(flight) for flight in flights], finish)


def _start_there(lane: int, hop: Hop, at_hand: Freight, account: _Account) -> Pending[Freight]:
    ridden = None if at_hand.probs is None else _packed(at_hand.probs, at_hand.ids)
    tensors = [at_hand.rows] if ridden is None else [at_hand.rows, ridden]
    leg = BACKWARD_OF[hop.back] if account.backward else hop.there
    sent_rows = hop.rows_at_hand if hop.is_gather else sum(hop.send_rows)
    account.enter(lane, hop, leg, hop.send_rows, sent_rows + hop.rows_arriving, tensors)
    flights = [_to_members(tensor, hop) for tensor in tensors]

    def finish(_: Freight) -> Freight:
        rows, *others = (flight.wait() for flight in flights)
        if at_hand.probs is None:
            return Freight(rows)
        return Freight(rows, *_unpacked(others[0], at_hand.probs, at_hand.ids is not None))

    return Pending(at_hand, [Flight(flight) for flight in flights], finish)


def _start_back(lane: int, hop: Hop, at_hand: Freight, account: _Account) -> Pending[Freight]:
    tensors = [at_hand.rows] if at_hand.probs is None else [at_hand.rows, at_hand.probs]
    leg = BACKWARD_OF[hop.there] if account.backward else hop.back
    account.enter(lane, hop, leg, hop.receive_rows, hop.rows_arriving + sum(hop.send_rows), tensors)
    flights = [_from_members(tensor, hop) for tensor in tensors]
    return Pending(
        at_hand, [Flight(flight) for flight in flights], lambda _: Freight(*(flight.wait() for flight in flights))
    )


def _to_members(tensor: Tensor, hop: Hop) -> Pending[Tensor]:
    send, receive = hop.send_rows, hop.receive_rows
    if hop.is_gather:
        return all_gather(tensor, hop.group)
    if hop.reach is None:
        # Ranks with different numbers of rows: no more bytes than these, where a gather of equal shapes would pad them.
        tensor = tensor.repeat(len(send), 1)
    return all_to_all(tensor, hop.group, send_rows=send, receive_rows=receive)


def _from_members(tensor: Tensor, hop: Hop) -> Pending[Tensor]:
    flight = all_to_all(tensor, hop.group, send_rows=hop.receive_rows, receive_rows=hop.send_rows)
    if hop.reach is not None:
        return flight
    return Pending(tensor, [Flight(flight)], lambda _: add_up(flight.wait().chunk(len(hop.send_rows))))


def _copied(arrived: Freight, fan_out: RowMap | None) -> Freight:
    if fan_out is None:
        return arrived
    probs = None if arrived.probs is None else permute(arrived.probs, fan_out)
    ids = None if arrived.ids is None else ids_of_rows(arrived.ids, fan_out)
    return Freight(permute(arrived.rows, fan_out), probs, ids)


def _added_up(arrived: Freight, fan_out: RowMap | None) -> Freight:
    if fan_out is None:
        return arrived
    probs = None if arrived.probs is None else unpermute(arrived.probs, fan_out)
    return Freight(unpermute(arrived.rows, fan_out), probs)


def _packed(probs: Tensor, ids: Tensor | None) -> Tensor:
    """Both in one tensor, which is one collective less."""
    return probs if ids is None else torch.cat((_viewed(probs, torch.int32), ids), 1)


def _unpacked(packed: Tensor, like: Tensor, with_ids: bool) -> tuple[Tensor, Tensor | None]:
    if not with_ids:
        return packed, None
    words = packed.shape[1] - like.shape[1]
    return _viewed(packed[:, :words], like.dtype), packed[:, words:]


def _viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    # Views of another size want the strides of a fresh tensor, which `contiguous` leaves alone where there is but one
    # row or none.
    return x.clone(memory_format=torch.contiguous_format).view(dtype)


class _There(Function):
    """What has arrived at the experts, as a function of what was sent."""

    @staticmethod
    def forward(
        ctx: Any,
        journey: Journey,
        pending: Pending[Freight],
        landed: Callable[[Tensor], None],
        rows: Tensor,
        probs: Tensor,
    ) -> tuple[Tensor, Tensor]:
        ctx.journey, ctx.ledgers = journey, open_ledgers()
        arrived = pending.wait()
        if arrived.ids is not None:
            landed(arrived.ids)
        assert arrived.probs is not None
        return arrived.rows, arrived.probs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor, grad_probs: Tensor) -> tuple[None, None, None, Tensor, Tensor | None]:
        home = _collect(ctx.journey, Freight(grad_rows, grad_probs), backward=True, kept=ctx.ledgers).wait()
        return None, None, None, home.rows, home.probs


class _Back(Function):
    """What has come back, as a function of what the experts sent."""

    @staticmethod
    def forward(ctx: Any, journey: Journey, pending: Pending[Freight], rows: Tensor) -> Tensor:
        ctx.journey, ctx.ledgers = journey, open_ledgers()
        return pending.wait().rows

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _spread(ctx.journey, Freight(grad_rows), backward=True, kept=ctx.ledgers).wait().rows


_there: Callable[..., tuple[Tensor, Tensor]] = _There.apply
_back: Callable[..., Tensor] = _Back.apply
