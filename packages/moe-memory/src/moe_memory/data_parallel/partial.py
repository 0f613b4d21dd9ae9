"""Partial gradients: of parameters that ranks besides the replicas hold too, while each has seen some of their terms.

Such are norms and routers where the ranks of `tp` see different tokens (`ShardSpec.grad_sum_axes`). What is summed here
is a rank's part, after the sum over the replicas: as little as can be, and in the dtype of master weights (case R069).
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from moe_memory.data_parallel.sections import cut
from moe_parallel import Groups, Pending, all_reduce


def sum_partial(gradients: Iterable[tuple[Tensor, tuple[str, ...]]], groups: Groups, *, limit_bytes: int) -> None:
    """Sum each gradient over the ranks of its axes, in place; every rank ends with the same bits.

    Small ones share a collective.

    Args:
        gradients: and their axes, the same on all ranks of these axes, in the same order.
        limit_bytes: of one collective, unless it is of a single gradient.
    """
    alike: dict[tuple[tuple[str, ...], torch.dtype], list[Tensor]] = {}
    for gradient, axes in gradients:
        if axes and gradient.numel() > 0:
            alike.setdefault((axes, gradient.dtype), []).append(gradient)
    sums: list[tuple[list[Tensor], Pending[Tensor]]] = []
    for (axes, _), tensors in alike.items():
        group = groups.group(*axes)
        if group is None:
            continue
        sizes = {index: tensor.numel() * tensor.element_size() for index, tensor in enumerate(tensors)}
        for indices in cut(list(sizes), sizes, limit_bytes):
            part = [tensors[index] for index in indices]
            flat = part[0] if len(part) == 1 else torch.cat([tensor.flatten() for tensor in part])
            sums.append((part, all_reduce(flat.contiguous(), group)))
    for part, pending in sums:
        total = pending.wait()
        if total is part[0]:  # a single one, which was contiguous
            continue
        for tensor, summed in zip(part, torch.split(total.flatten(), [t.numel() for t in part]), strict=True):
            tensor.copy_(summed.view(tensor.shape))
