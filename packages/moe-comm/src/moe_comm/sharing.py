"""Rows to all ranks that share an expert, and the sum of what they make of them back: each other's backward.

With `etp` ranks per expert every one of them holds a part of its inner features. Each needs all rows of the expert, and
what it gives back, the gradients of rows and of probabilities included, is its part of a sum.

Both are the exchange of a parcel: rows are repeated and sent to every rank, and what returns from every rank is added
up. It moves the bytes that are needed and no more, where a gather of equal shapes would pad the rows of every rank to
the largest number; for it the sender holds its rows `etp` times until they are gone.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moe_comm.dispatcher import Parcel
from moe_comm.exchange import Flight, Splits, exchange
from moe_parallel import Pending, add_up


def gather(parcel: Parcel, splits: Splits) -> Pending[Parcel]:
    """The rows of all ranks, in the order of the ranks; the same bits on each.

    Args:
        parcel: rows of this rank.
        splits: as many rows to each rank, and as many from each as it has.
    """
    copies = len(splits.send_rows)
    probs = None if parcel.probs is None else _repeat(parcel.probs, copies)
    return exchange(Parcel(rows=_repeat(parcel.rows, copies), probs=probs), splits, "gather")


def scatter_sum(parcel: Parcel, splits: Splits) -> Pending[Parcel]:
    """Of rows in the order of `gather`, those that this rank brought, summed over all ranks.

    They are added up in the order of the ranks, in the internal dtype, and rounded once.

    Args:
        parcel: this rank's part of the sum for the rows of all ranks; it carries no probabilities.
        splits: those of the gather.
    """
    arriving = exchange(parcel, splits.reversed(), "scatter")
    copies = len(splits.send_rows)
    return Pending(parcel, [Flight(arriving)], lambda _: Parcel(rows=_sum(arriving.wait().rows, copies)))


def _repeated(rows: Tensor, copies: int) -> Tensor:
    return rows.repeat(copies, *[1] * (rows.dim() - 1))


class _Repeat(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return _repeated(rows, copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return add_up(grad.chunk(ctx.copies)), None


class _Sum(Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return add_up(parts.chunk(copies))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _repeated(grad, ctx.copies), None


_repeat: Callable[..., Tensor] = _Repeat.apply
_sum: Callable[..., Tensor] = _Sum.apply
