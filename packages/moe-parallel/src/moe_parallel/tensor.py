"""Tensor and sequence parallelism: tokens between ranks that share a layer's features, as differentiable functions.

Where ranks of `tp` share a layer, each holds some of its features and they all see the same tokens: what a rank
computes there, and the gradient of what it reads there, is a part of a sum over the ranks. Outside, every rank holds
all tokens alike, or with sequence parallelism (arXiv 2205.05198) consecutive ones of its own. Each function here is one
way in or out; its backward is the reverse of it.

Shape legend: T tokens (rows, dim 0), W ranks, [T, ..] is any shape behind it.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_parallel.collectives import all_gather, all_reduce, describe_group, reduce_scatter
from moe_parallel.errors import MoeParallelError

Transition = Literal["sum_gradients", "sum_outputs", "gather_rows", "sum_scatter_rows", "split_rows", "join_rows"]


def sum_gradients(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """x itself; backward sums over the ranks. The way into shared features for tokens that every rank holds."""
    return x if group is None else _apply(_same, _summed, x, group)


def sum_outputs(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the ranks, on all of them; backward passes on. The way out to tokens that every rank holds."""
    return x if group is None else _apply(_summed, _same, x, group)


def sum_everywhere(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the ranks, on all of them, for a value of which each rank makes something else; backward sums."""
    return x if group is None else _apply(_summed, _summed, x, group)


def gather_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[T/W, ..] to [T, ..], the rows of all ranks in their order; backward sums, and keeps the rows of this rank.

    The way into shared features for tokens that are split.
    """
    return x if group is None else _apply(_joined, _sum_scattered, x, group)


def sum_scatter_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[T, ..] to [T/W, ..], this rank's rows of the sum over the ranks; backward joins. The way out to split tokens.

    Raises:
        MoeParallelError: the rows cannot be split evenly.
    """
    return x if group is None else _apply(_sum_scattered, _joined, x, group)


def split_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[T, ..] to [T/W, ..], the rows of this rank, where every rank holds the same; backward joins.

    Raises:
        MoeParallelError: the rows cannot be split evenly.
    """
    return x if group is None else _apply(_own, _joined, x, group)


def join_rows(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """[T/W, ..] to [T, ..], the rows of all ranks in their order; backward keeps those of this rank.

    What follows must be the same on every rank, so that each holds the whole gradient.
    """
    return x if group is None else _apply(_joined, _own, x, group)


TRANSITIONS: dict[Transition, Callable[[Tensor, ProcessGroup | None], Tensor]] = {
    "sum_gradients": sum_gradients,
    "sum_outputs": sum_outputs,
    "gather_rows": gather_rows,
    "sum_scatter_rows": sum_scatter_rows,
    "split_rows": split_rows,
    "join_rows": join_rows,
}

_Move = Callable[[Tensor, ProcessGroup], Tensor]


def _same(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.view_as(x)


def _summed(x: Tensor, group: ProcessGroup) -> Tensor:
    # A collective writes in place, and what it was given belongs to others. Bytes are summed in the order of memory,
    # which must be that of the dims on every rank: strides of a gradient may differ from rank to rank.
    return all_reduce(x.clone(memory_format=torch.contiguous_format), group).wait()


def _joined(x: Tensor, group: ProcessGroup) -> Tensor:
    return all_gather(x, group).wait()


def _sum_scattered(x: Tensor, group: ProcessGroup) -> Tensor:
    _check_rows(x, group)
    return reduce_scatter(x, group).wait()


def _own(x: Tensor, group: ProcessGroup) -> Tensor:
    _check_rows(x, group)
    # A copy: the rest of x need not live as long.
    return x.chunk(group.size())[group.rank()].clone()


def _check_rows(x: Tensor, group: ProcessGroup) -> None:
    if x.shape[0] % group.size():
        raise MoeParallelError(
            f"{x.shape[0]} tokens cannot be split evenly in {describe_group(group)}; pad them to a multiple of "
            f"{group.size()}"
        )


class _Moved(Function):
    @staticmethod
    def forward(ctx: Any, there: _Move, back: _Move, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, None]:
        return None, None, ctx.back(grad, ctx.group), None


_apply: Callable[..., Tensor] = _Moved.apply
