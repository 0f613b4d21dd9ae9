"""Collectives that return a `Pending` and whose failures say who was waiting for whom, in which named group.

Thin functions over `torch.distributed`; they are not differentiable. Groups made by `FoldedMesh` carry their axes as
their description, which is the name in messages.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moe_parallel._torch_compat import all_gather_into, reduce_scatter_into
from moe_parallel.errors import MoeParallelError
from moe_parallel.pending import Pending


class CollectiveError(MoeParallelError):
    """A collective did not complete: a peer died, did not come in time, or came with something else."""


def describe_group(group: ProcessGroup) -> str:
    """Name and members, for messages: `group ep of ranks 0, 1, 2, 3`."""
    ranks = dist.get_process_group_ranks(group)
    return f"group {group.group_desc or group.group_name} of ranks {', '.join(map(str, ranks))}"


def all_reduce(x: Tensor, group: ProcessGroup, op: Literal["sum", "max", "min"] = "sum") -> Pending[Tensor]:
    """Reduce over the group, in place; every rank ends with the same bits."""
    operation = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}[op]
    return _start("all_reduce", group, x, lambda: dist.all_reduce(x, operation, group=group, async_op=True))


def all_gather(x: Tensor, group: ProcessGroup, out: Tensor | None = None) -> Pending[Tensor]:
    """Concatenate the equally shaped `x` of all ranks along dim 0, in the order of the group."""
    x = x.contiguous()
    if out is None:
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    return _start("all_gather", group, out, lambda: all_gather_into(out, x, group))


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Pending[Tensor]:
    """Sum over the group and keep this rank's part: `x` is [ranks * n, ...], the result [n, ...].

    On gloo, whose own reduce-scatter is slower than its all-reduce, the parts are exchanged and added up here in the
    order of the ranks; `x` must not be changed before the wait is over.
    """
    ranks = group.size()
    x = x.contiguous()
    if dist.get_backend(group) == "nccl":
        out = x.new_empty((x.shape[0] // ranks, *x.shape[1:]))
        return _start("reduce_scatter", group, out, lambda: reduce_scatter_into(out, x, group))
    parts = torch.empty_like(x)

    def add_up(received: Tensor) -> Tensor:
        return received.view(ranks, x.shape[0] // ranks, *x.shape[1:]).sum(0)

    start = lambda: dist.all_to_all_single(parts, x, group=group, async_op=True)  # noqa: E731
    return _start("reduce_scatter", group, parts, start, add_up)


def all_to_all(
    x: Tensor, group: ProcessGroup, *, send_rows: Sequence[int], receive_rows: Sequence[int]
) -> Pending[Tensor]:
    """Send consecutive rows of `x` to the ranks of the group in order; the result has what they sent, in their order.

    Row counts may differ and be zero. `x` must not be changed before the wait is over.
    """
    x = x.contiguous()
    out = x.new_empty((sum(receive_rows), *x.shape[1:]))
    return _start(
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
        except RuntimeError as error:
            raise _failure(self._name, self._group, time.monotonic() - self._began, error) from error

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


def _start(
    name: str,
    group: ProcessGroup,
    value: Tensor,
    issue: Callable[[], Any],
    finish: Callable[[Tensor], Tensor] | None = None,
) -> Pending[Tensor]:
    began = time.monotonic()
    try:
        work = issue()
    except RuntimeError as error:
        raise _failure(name, group, time.monotonic() - began, error) from error
    return Pending(value, [_NamedWork(work, name, group)], finish)


def _failure(name: str, group: ProcessGroup, seconds: float, error: RuntimeError) -> CollectiveError:
    reason = " ".join(str(error).split())
    return CollectiveError(
        f"rank {dist.get_rank()}: {name} in {describe_group(group)} failed after {seconds:.1f} s: {reason}"
    )
