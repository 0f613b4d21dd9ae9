"""Choice by a transport plan: every token hands out one unit, every expert receives the same (BASE, arXiv 2103.16716).

Shape legend: T tokens here, K choices per token, E experts.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from moe_kernels.dtypes import internal_dtype
from moe_kernels.top_k import stable_top_k


@torch.no_grad()
def sinkhorn_choices(
    logits_TE: Tensor,
    top_k: int,
    iterations: int,
    *,
    valid_T: Tensor | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The K experts with the largest share of each token in the plan, int64 [T, K]. The host is not synchronised.

    The plan is exp(logits) whose rows and columns are scaled in turn, as often as said: rows to a sum of one by a
    softmax, which nothing overflows, columns to equal sums by one potential per expert. No gradient; without
    iterations these are the experts with the largest logits.

    Args:
        valid_T: bool, False for tokens that belong to no plan. Rows of `Routing.bad_rows` do not either.
        reduce: sums a tensor over the ranks that share the tokens, once an iteration; it gets [E] of its own.
    """
    logits_TE = logits_TE.detach().to(internal_dtype(logits_TE.dtype))
    planned_T = logits_TE.amax(-1).isfinite()
    if valid_T is not None:
        planned_T &= valid_T
    tiny = torch.finfo(logits_TE.dtype).tiny
    potential_E = logits_TE.new_zeros(logits_TE.shape[1])
    for _ in range(iterations):
        plan_TE = torch.softmax(logits_TE + potential_E, -1)
        load_E = plan_TE.masked_fill_(~planned_T[:, None], 0).sum(0)
        if reduce is not None:
            load_E = reduce(load_E)
        # Against the mean, so that potentials do not drift; where all loads underflow they stay as they are.
        potential_E = potential_E - (load_E / load_E.mean().clamp(min=tiny)).clamp(min=tiny).log()
    return stable_top_k(logits_TE + potential_E, top_k)
