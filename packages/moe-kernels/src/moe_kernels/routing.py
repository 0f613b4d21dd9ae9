"""The router's decision: which experts each token chooses, and how much each choice weighs.

Everything here is in the internal dtype. Shape legend: T tokens here, K choices per token, E experts, G groups.
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels.config import RouterConfig
from moe_kernels.dtypes import internal_dtype
from moe_kernels.errors import MoeKernelsError


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The choices of T tokens.

    Attributes:
        ids_TK: int64 global expert ids; -1 is "no expert" (padding token, dropped choice). Duplicates are allowed.
        probs_TK: combine weight of each choice, in the internal dtype; part of the autograd graph.
        num_experts: E, over all ranks.
        bad_rows: int64 scalar on the device, valid tokens whose logits held NaN or +inf, or were all -inf. Their ids
            are valid experts all the same; the caller reads the number where it synchronises anyway.
    """

    ids_TK: Tensor
    probs_TK: Tensor
    num_experts: int
    bad_rows: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))

    def counts_E(self) -> Tensor:
        """Number of choices per expert, int64, on the device of the ids; no host synchronisation."""
        ids = self.ids_TK.reshape(-1)
        counts = torch.zeros(self.num_experts + 1, dtype=torch.int64, device=ids.device)
        ones = torch.ones_like(ids)
        return counts.scatter_add_(0, torch.where(ids < 0, self.num_experts, ids), ones)[:-1]


def route(
    logits_TE: Tensor,
    config: RouterConfig,
    *,
    bias_E: Tensor | None = None,
    valid_T: Tensor | None = None,
    ids_TK: Tensor | None = None,
) -> Routing:
    """Choose experts from router logits. The host is not synchronised.

    With s the scores (softmax or sigmoid of the logits) a token takes the K experts with the largest s + bias, each
    weighing `scale` * s, or `scale` * s / sum of the chosen s when normalised. Normalised weights are computed from
    logarithms, so that they sum to one even where every chosen score underflows. Without bias and groups the choice is
    made on the logits, which order the experts as exact scores would.

    Args:
        logits_TE: [T, E] of any float dtype.
        config: the rules.
        bias_E: steers the choice only; the weights do not depend on it and it gets no gradient.
        valid_T: bool, False for padding tokens: ids -1, weight zero and no gradient, whatever their logits.
        ids_TK: earlier choices to repeat, as an earlier call returned them; weights come from the logits of now.

    Raises:
        MoeKernelsError: the config does not fit E experts.
    """
    num_experts = logits_TE.shape[-1]
    _require(config, num_experts)
    logits_TE = logits_TE.to(internal_dtype(logits_TE.dtype))
    bad_T = ~logits_TE.detach().amax(-1).isfinite()
    if valid_T is not None:
        bad_T = bad_T & valid_T
        logits_TE = logits_TE.masked_fill(~valid_T[:, None], 0)
    if ids_TK is None:
        ids_TK = _choose(logits_TE.detach(), config, bias_E)
    if valid_T is not None:
        ids_TK = ids_TK.masked_fill(~valid_T[:, None], -1)
    # Masked even where every choice is valid: a recomputed forward, which repeats ids, must save the same tensors.
    probs_TK = _weigh(logits_TE, ids_TK.clamp(min=0), config).masked_fill(ids_TK < 0, 0)
    return Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=num_experts, bad_rows=bad_T.sum())


def scores(logits_TE: Tensor, score: Literal["softmax", "sigmoid"]) -> Tensor:
    """The full distribution over experts, A of numerics §2: [T, E], each row sums to one, in the internal dtype.

    For `sigmoid` it is sigma(l) / sum sigma(l), as the softmax of log sigma(l), so that it is defined where every
    sigma underflows.
    """
    logits_TE = logits_TE.to(internal_dtype(logits_TE.dtype))
    return torch.softmax(logits_TE if score == "softmax" else F.logsigmoid(logits_TE), -1)


def stable_top_k(x: Tensor, k: int) -> Tensor:
    """Ids of the k largest entries of each row, largest first; the lower id wins a tie, on every call and device.

    Equal to the first k of a stable descending sort. NaN counts as the smallest value, so that ids are always valid and
    distinct. x is [T, E], the result int64 [T, k]; no gradient, no host synchronisation.
    """
    if not 1 <= k <= x.shape[-1]:
        raise MoeKernelsError(f"cannot choose {k} of {x.shape[-1]} entries; k must lie between 1 and their number")
    # argmax promises the first of equal maxima, torch.topk promises nothing. For k <= 8 of 8 to 256 experts k passes
    # of it cost as much as one topk and a quarter to half of a stable sort.
    lowest = torch.finfo(x.dtype).min
    rest = torch.nan_to_num(x.detach(), nan=lowest, neginf=lowest)
    ids = [rest.argmax(-1, keepdim=True)]
    while len(ids) < k:
        rest.scatter_(-1, ids[-1], -torch.inf)
        ids.append(rest.argmax(-1, keepdim=True))
    return torch.cat(ids, -1)


@cache
def _require(config: RouterConfig, num_experts: int) -> None:
    if problems := config.problems(num_experts):
        raise MoeKernelsError(" ".join(f"{name} = {getattr(config, name)!r}: {rule}" for name, rule in problems))


def _choose(logits_TE: Tensor, config: RouterConfig, bias_E: Tensor | None) -> Tensor:
    if bias_E is None and config.groups == 1:
        return stable_top_k(logits_TE, config.top_k)
    choice_TE = torch.softmax(logits_TE, -1) if config.score == "softmax" else torch.sigmoid(logits_TE)
    if bias_E is not None:
        choice_TE = choice_TE + bias_E.detach()
    if config.groups > 1:
        choice_TGE = choice_TE.view(-1, config.groups, choice_TE.shape[-1] // config.groups)
        best_TG = choice_TGE.topk(config.top_k // config.group_top_k, -1).values.sum(-1)
        closed_TG = torch.ones_like(best_TG, dtype=torch.bool)
        closed_TG.scatter_(-1, stable_top_k(best_TG, config.group_top_k), False)
        # Minus infinity, not zero: biased scores may be negative.
        choice_TE = choice_TGE.masked_fill(closed_TG[..., None], -torch.inf).view_as(choice_TE)
    return stable_top_k(choice_TE, config.top_k)


def _weigh(logits_TE: Tensor, ids_TK: Tensor, config: RouterConfig) -> Tensor:
    logits_TK = logits_TE.gather(-1, ids_TK)
    if config.score == "sigmoid":
        probs_TK = torch.softmax(F.logsigmoid(logits_TK), -1) if config.normalize else torch.sigmoid(logits_TK)
    elif config.normalize or config.softmax_order == "after_topk":
        # Softmax over all, divided by the sum of the chosen, is softmax over the chosen.
        probs_TK = torch.softmax(logits_TK, -1)
    else:
        probs_TK = torch.softmax(logits_TE, -1).gather(-1, ids_TK)
    return probs_TK if config.scale == 1 else probs_TK * config.scale
