"""Collectives that return a `Pending` and whose failures say who was waiting for whom, in which named group.

Thin functions over `torch.distributed`; they are not differentiable. Until the wait is over, tensors that were given
must not be changed. Groups made by `FoldedMesh` carry their axes as their description, which is the name in messages.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_parallel._torch_compat import all_gather_into, is_lost_peer, reduce_scatter_into
from moe_parallel.errors import MoeParallelError
from moe_parallel.pending import Pending
from moe_parallel.precision import internal_dtype

E = TypeVar("E", bound=BaseException)

# What fails on the device of this rank, wherever the host then notices it: no peer is lost, and nothing was refused.
DEVICE_ERRORS = (torch.AcceleratorError, torch.OutOfMemoryError)

# A message names so many members of a group.
_MOST_NAMES = 16


class CollectiveError(MoeParallelError):
    """A collective did not complete: a peer died, did not come in time, or came with something else.

    Attributes:
        ranks: members of the group.
        cause: the rank that failed in another way, and with what; None as long as no such rank is known.
    """

    ranks: tuple[int, ...] = ()
    cause: tuple[int, str] | None = None


def describe_group(group: ProcessGroup) -> str:
    """Name and members, for messages: `group ep of ranks 0, 1, 2, 3`."""
    name = "world" if group is dist.group.WORLD else group.group_desc or group.group_name
    return describe_members(name, dist.get_process_group_ranks(group))


def describe_members(name: str, ranks: Sequence[int]) -> str:
    """As `describe_group`, of a group that may not exist yet."""
    more = f" and {len(ranks) - _MOST_NAMES} more" if len(ranks) > _MOST_NAMES else ""
    return f"group {name} of ranks {', '.join(map(str, ranks[:_MOST_NAMES]))}{more}"


def lost_peers(doing: str, ranks: Sequence[int], seconds: float, error: Exception) -> CollectiveError:
    """The failure of what needed all of `ranks`, after `seconds`."""
    failure = CollectiveError(f"rank {dist.get_rank()}: {doing} failed after {seconds:.1f} s: {_reason(error)}")
    failure.ranks = tuple(ranks)
    return failure


def as_collective_error(error: E) -> "E | CollectiveError":
    """The error, but a `CollectiveError` where a peer was lost in a collective that torch makes by itself, as those of
    `fully_shard`."""
    if not (dist.is_initialized() and is_lost_peer(error)):
        return error
    failure = CollectiveError(f"rank {dist.get_rank()}: a collective of torch's own failed: {_reason(error)}")
    failure.ranks = tuple(range(dist.get_world_size()))
    failure.__notes__ = list(getattr(error, "__notes__", []))
    return failure


def all_reduce(x: Tensor, group: ProcessGroup, op: Literal["sum", "max", "min"] = "sum") -> Pending[Tensor]:
    """Reduce over the group, in place; every rank ends with the same bits.

    Raises:
        MoeParallelError: `x` is not contiguous: backends reduce memory, and ranks may lay it out differently.
    """
    if not x.is_contiguous():
        raise MoeParallelError(f"all_reduce in {describe_group(group)} is in place and needs contiguous memory")
    operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    return start("all_reduce", group, x, lambda: dist.all_reduce(x, operation, group=group, async_op=True))


def all_gather(x: Tensor, group: ProcessGroup, out: Tensor | None = None) -> Pending[Tensor]:
    """Concatenate the equally shaped `x` of all ranks along dim 0, in the order of the group."""
    x = x.contiguous()
    if out is None:
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    return start("all_gather", group, out, lambda: all_gather_into(out, x, group))


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Pending[Tensor]:
    """Sum over the group and keep this rank's part: `x` is [ranks * n, ...], the result [n, ...].

    On the CPU, where gloo's own reduce-scatter is slower than its all-reduce, the parts are exchanged and added up
    here, in the order of the ranks and in FP32 or wider.

    Raises:
        MoeParallelError: dim 0 cannot be cut into as many parts as there are ranks.
    """
    ranks = group.size()
    if x.shape[0] % ranks:
        raise MoeParallelError(
            f"reduce_scatter in {describe_group(group)} cuts dim 0 into {ranks} equal parts, but it has {x.shape[0]} "
            "entries"
        )
    x = x.contiguous()
    if x.is_cuda:
        out = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
        return start("reduce_scatter", group, out, lambda: reduce_scatter_into(out, x, group))
    parts = torch.empty_like(x)
    issue = partial(dist.all_to_all_single, parts, x, group=group, async_op=True)
    return start("reduce_scatter", group, parts, issue, lambda received: add_up(received.chunk(ranks)))


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """The sum of equally shaped parts, one after the other, in the internal dtype, rounded once."""
    # `sum` of the stacked parts is slower, and its order depends on the column.
    dtype = parts[0].dtype
    total = parts[0].to(internal_dtype(dtype) if dtype.is_floating_point else dtype, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(dtype)


def all_to_all(
    x: Tensor, group: ProcessGroup, *, send_rows: Sequence[int], receive_rows: Sequence[int]
) -> Pending[Tensor]:
    """Send consecutive rows of `x` to the ranks of the group in order; the result has what they sent, in their order.

    Row counts may differ and be zero.

    Raises:
        MoeParallelError: the rows to send are not those of `x`, or there is not one count for each rank.
    """
    if not len(send_rows) == len(receive_rows) == group.size() or sum(send_rows) != x.shape[0]:
        raise MoeParallelError(
            f"all_to_all in {describe_group(group)} takes one count for each rank to send and to receive, and sends "
            f"all {x.shape[0]} rows; it was given {list(send_rows)} and {list(receive_rows)}"
        )
    x = x.contiguous()
    out = x.new_empty((sum(receive_rows), *x.shape[1:]))
    return start(
        "all_to_all",
        group,
        out,
        lambda: dist.all_to_all_single(out, x, list(receive_rows), list(send_rows), group=group, async_op=True),
    )


class _NamedWork:
    """Work whose failure names the collective, the group and the time it took to fail."""

    def __init__(self, work: Any, name: str, group: ProcessGroup) -> None:
        self._work, self._name, self._group = work, name, group
        self._began = time.monotonic()

    def wait(self) -> object:
        try:
            return self._work.wait()
        except DEVICE_ERRORS:
            raise
        except RuntimeError as error:
            raise _failure(self._name, self._group, time.monotonic() - self._began, error) from error

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def start(
    name: str,
    group: ProcessGroup,
    value: Tensor,
    issue: Callable[[], Any],
    finish: Callable[[Tensor], Tensor] | None = None,
) -> Pending[Tensor]:
    began = time.monotonic()
    try:
        work = issue()
    except DEVICE_ERRORS:
        raise
    except dist.DistError as error:
        raise _failure(name, group, time.monotonic() - began, error) from error
    except (RuntimeError, ValueError, TypeError) as error:  # refused here; the peers have nothing to do with it
        raise MoeParallelError(f"{name} in {describe_group(group)} cannot start: {_one_line(error)}") from error
    return Pending(value, [_NamedWork(work, name, group)], finish)


def _failure(name: str, group: ProcessGroup, seconds: float, error: RuntimeError) -> CollectiveError:
    return lost_peers(f"{name} in {describe_group(group)}", dist.get_process_group_ranks(group), seconds, error)


def _reason(error: BaseException) -> str:
    return _one_line(error).partition(" This is typically caused by")[0].rstrip(".")  # without gloo's advice


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
