"""The expert bias: balance without a loss (arXiv 2408.15664). It steers choices, never weights; no gradient reaches it.

Shape legend: E experts.
"""

import torch
from torch import Tensor

from moe_kernels.errors import MoeKernelsError


@torch.no_grad()
def update_expert_bias(bias_E: Tensor, counts_E: Tensor, rate: float, *, recentred: bool = False) -> None:
    """b <- b + rate * sign(mean(counts) - counts), in place; sign(0) = 0. The host is not synchronised.

    Args:
        bias_E: in the internal dtype.
        counts_E: int64, choices of each expert in one optimizer step over all ranks, or the bias of ranks differs.
        rate: size of a change.
        recentred: subtract the mean afterwards, so that the bias does not drift.

    Raises:
        MoeKernelsError: other shapes, or counts that are not integers.
    """
    if bias_E.shape != counts_E.shape or counts_E.dtype != torch.int64:
        raise MoeKernelsError(
            f"a bias of shape {list(bias_E.shape)} is updated by as many int64 counts, not by {list(counts_E.shape)} "
            f"{counts_E.dtype}"
        )
    # Both sides times E: integers, so that an expert at the mean is exactly there.
    bias_E.add_((counts_E.sum() - counts_E * counts_E.numel()).sign().to(bias_E.dtype), alpha=rate)
    if recentred:
        bias_E.sub_(bias_E.mean())
