"""The k largest entries of a row, with an order of ties that holds everywhere.

Shape legend: T rows, E entries.
"""

import torch
from torch import Tensor

from moe_kernels.errors import MoeKernelsError
from moe_kernels.implementation import uses_triton


def stable_top_k(x: Tensor, k: int) -> Tensor:
    """Ids of the k largest entries of each row, largest first; the lower id wins a tie, on every call and device.

    Equal to the first k of a stable descending sort. NaN counts as the smallest value, so that ids are always valid and
    distinct. x is [T, E], the result int64 [T, k]; no gradient, no host synchronisation.
    """
    if not 1 <= k <= x.shape[-1]:
        raise MoeKernelsError(f"cannot choose {k} of {x.shape[-1]} entries; k must lie between 1 and their number")
    if uses_triton(x):
        from moe_kernels.triton_kernels import routing as kernels

        ids_TK: Tensor = kernels.top_k(x.detach(), k)
        return ids_TK
    # argmax promises the first of equal maxima, torch.topk promises nothing. For k <= 8 of 8 to 256 experts k passes
    # of it cost as much as one topk and a quarter to half of a stable sort.
    lowest = torch.finfo(x.dtype).min
    rest = torch.nan_to_num(x.detach(), nan=lowest, neginf=lowest)
    ids = [rest.argmax(-1, keepdim=True)]
    while len(ids) < k:
        rest.scatter_(-1, ids[-1], -torch.inf)
        ids.append(rest.argmax(-1, keepdim=True))
    return torch.cat(ids, -1)
