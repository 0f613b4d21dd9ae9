"""Messages between two ranks, and an exchange along a ring of ranks."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_parallel.collectives import DEVICE_ERRORS, describe_group, start
from moe_parallel.errors import MoeParallelError
from moe_parallel.pending import Pending


def shift(x: Tensor, group: ProcessGroup, out: Tensor | None = None) -> Pending[Tensor]:
    """Send `x` to the next rank of the group, and receive what the rank before sends, of the same shape and dtype.

    Every rank of the group takes part, and calls in the same order as its neighbours. Neither `x` nor `out` may be
    changed before the wait is over.

    Args:
        out: contiguous, where to receive; None allocates it.

    Raises:
        CollectiveError: a neighbour died, or did not come in time, which only the wait notices.
    """
    x = x.contiguous()
    received = x.new_empty(x.shape) if out is None else out
    rank, ranks = group.rank(), group.size()
    after, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))

    def issue() -> "_All":
        # One batch, since NCCL would let each of two ranks wait with a send for the other's receive.
        send, receive = dist.P2POp(dist.isend, x, after, group), dist.P2POp(dist.irecv, received, before, group)
        try:
            return _All(dist.batch_isend_irecv([send, receive]))
        except DEVICE_ERRORS:
            raise
        except RuntimeError as error:  # how gloo says at once that the connection is gone
            raise dist.DistNetworkError(str(error)) from error

    return start("shift", group, received, issue)


def send(x: Tensor, group: ProcessGroup, to: int) -> Pending[Tensor]:
    """Send `x` to a place of the group, which receives it with `receive`; messages between two ranks keep their order.

    Args:
        to: place in the group.

    Raises:
        CollectiveError: the receiver died, or did not come in time, which only the wait notices.
    """
    x = x.contiguous()
    return start("send", group, x, lambda: _issued(dist.isend, x, group, to))


def receive(out: Tensor, group: ProcessGroup, source: int) -> Pending[Tensor]:
    """Receive into `out` what a place of the group sends next; as `send`.

    Raises:
        MoeParallelError: `out` is not contiguous.
    """
    if not out.is_contiguous():
        raise MoeParallelError(f"receive in {describe_group(group)} is in place and needs contiguous memory")
    return start("receive", group, out, lambda: _issued(dist.irecv, out, group, source))


def _issued(operation: Any, x: Tensor, group: ProcessGroup, place: int) -> Any:
    try:
        return operation(x, dist.get_global_rank(group, place), group=group)
    except DEVICE_ERRORS:
        raise
    except RuntimeError as error:  # how gloo says at once that the connection is gone
        raise dist.DistNetworkError(str(error)) from error


class _All:
    """Several pieces of work as one."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
