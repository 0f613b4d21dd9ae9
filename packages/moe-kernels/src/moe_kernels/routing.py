"""The router's decision: which experts each token chooses, and how much each choice weighs.

Everything here is in the internal dtype. Shape legend: T tokens here, K choices per token, E experts, G groups.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_kernels.config import RouterConfig
from moe_kernels.counter_random import TokenRandom
from moe_kernels.dtypes import internal_dtype
from moe_kernels.errors import MoeKernelsError
from moe_kernels.forced_balance import balanced_choices
from moe_kernels.implementation import uses_triton
from moe_kernels.sinkhorn import sinkhorn_choices
from moe_kernels.top_k import stable_top_k


@dataclass(frozen=True, kw_only=True)
class Routing:
    """The choices of T tokens.

    Attributes:
        ids_TK: int64 global expert ids; -1 is "no expert" (padding token, dropped choice). Duplicates are allowed.
        probs_TK: combine weight of each choice, in the internal dtype; part of the autograd graph.
        num_experts: E, over all ranks.
        bad_rows: int64 scalar on the device, valid tokens whose logits held NaN or +inf, or were all -inf. Their ids
            are valid experts all the same; the caller reads the number where it synchronises anyway.
        counted: ids, and the number of choices per expert among them, where they were counted as they were chosen.
    """

    ids_TK: Tensor
    probs_TK: Tensor
    num_experts: int
    bad_rows: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    counted: tuple[Tensor, Tensor] | None = None

    def counts_E(self) -> Tensor:
        """Number of choices per expert, int64, on the device of the ids, to be read only; no host synchronisation."""
        # Whoever replaces the ids does not have to think of the counts.
        if self.counted is not None and self.counted[0] is self.ids_TK:
            return self.counted[1]
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
    random: TokenRandom | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
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
        ids_TK: earlier choices to repeat, as an earlier call returned them; weights come from the logits of now, and
            -1 takes no part in their sum.
        random: what the tokens draw in training. None in evaluation, where neither `sinkhorn_iterations` nor
            `force_balance` acts.
        reduce: sums a tensor over the ranks that share the tokens of a transport plan (`sinkhorn_choices`).

    Raises:
        MoeKernelsError: the config does not fit E experts, other tensors do not fit the logits, or a bias shall steer
            a transport plan.
    """
    num_experts = logits_TE.shape[-1]
    # An int where a trace has symbols: the number of experts is the same in every call.
    (_require if torch.compiler.is_compiling() else _require_once)(config, int(num_experts))
    _check_shapes(logits_TE, config, bias_E, valid_T, ids_TK)
    if ids_TK is None and random is not None:
        ids_TK = _choose_in_training(logits_TE, config, bias_E, valid_T, random, reduce)
    if uses_triton(logits_TE):
        ids_TK, probs_TK, counts = _route(logits_TE, config, bias_E, valid_T, ids_TK)
        return Routing(
            ids_TK=ids_TK,
            probs_TK=probs_TK,
            num_experts=num_experts,
            bad_rows=counts[-1],
            counted=(ids_TK, counts[:-1]),
        )
    logits_TE = logits_TE.to(internal_dtype(logits_TE.dtype))
    bad_T = ~logits_TE.detach().amax(-1).isfinite()
    if valid_T is not None:
        bad_T = bad_T & valid_T
        logits_TE = logits_TE.masked_fill(~valid_T[:, None], 0)
    # Of choices that are made here all or none is absent.
    holes_TK = None if ids_TK is None else ids_TK < 0
    if ids_TK is None:
        ids_TK = _choose(logits_TE.detach(), config, bias_E)
    if valid_T is not None:
        ids_TK = ids_TK.masked_fill(~valid_T[:, None], -1)
    # Masked even where every choice is valid: a recomputed forward, which repeats ids, must save the same tensors.
    probs_TK = _weigh(logits_TE, ids_TK.clamp(min=0), holes_TK, config).masked_fill(ids_TK < 0, 0)
    return Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=num_experts, bad_rows=bad_T.sum())


def scores(logits_TE: Tensor, score: Literal["softmax", "sigmoid"]) -> Tensor:
    """The full distribution over experts, A of numerics §2: [T, E], each row sums to one, in the internal dtype.

    For `sigmoid` it is sigma(l) / sum sigma(l), as the softmax of log sigma(l), so that it is defined where every
    sigma underflows.
    """
    if uses_triton(logits_TE):
        return _scores(logits_TE, score == "sigmoid")
    logits_TE = logits_TE.to(internal_dtype(logits_TE.dtype))
    return torch.softmax(logits_TE if score == "softmax" else F.logsigmoid(logits_TE), -1)


def _require(config: RouterConfig, num_experts: int) -> None:
    if problems := config.problems(num_experts):
        raise MoeKernelsError(" ".join(f"{name} = {getattr(config, name)!r}: {rule}" for name, rule in problems))


# Dynamo warns of a cache, which a trace has no use for.
_require_once = cache(_require)


def _choose_in_training(
    logits_TE: Tensor,
    config: RouterConfig,
    bias_E: Tensor | None,
    valid_T: Tensor | None,
    random: TokenRandom,
    reduce: Callable[[Tensor], Tensor] | None,
) -> Tensor | None:
    """The choices that only training makes; None where it makes those of evaluation."""
    if config.force_balance:
        return balanced_choices(logits_TE.shape[1], config.top_k, random.of("forced balance"))
    if not config.sinkhorn_iterations:
        return None
    if bias_E is not None:
        raise MoeKernelsError(
            "an expert bias does not steer a transport plan; leave one of bias_E and sinkhorn_iterations out"
        )
    return sinkhorn_choices(logits_TE, config.top_k, config.sinkhorn_iterations, valid_T=valid_T, reduce=reduce)


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


def _weigh(logits_TE: Tensor, ids_TK: Tensor, holes_TK: Tensor | None, config: RouterConfig) -> Tensor:
    logits_TK = logits_TE.gather(-1, ids_TK)
    if _over_chosen(config):
        # Softmax over all, divided by the sum of the chosen, is softmax over the chosen.
        log_TK = F.logsigmoid(logits_TK) if config.score == "sigmoid" else logits_TK
        if holes_TK is not None:
            # Added and not filled in, which would save a mask that the first forward has not.
            log_TK = log_TK + holes_TK.to(log_TK.dtype) * (torch.finfo(log_TK.dtype).min / 2)
        probs_TK = torch.softmax(log_TK, -1)
    elif config.score == "sigmoid":
        probs_TK = torch.sigmoid(logits_TK)
    else:
        probs_TK = torch.softmax(logits_TE, -1).gather(-1, ids_TK)
    return probs_TK if config.scale == 1 else probs_TK * config.scale


def _over_chosen(config: RouterConfig) -> bool:
    return config.normalize or (config.score == "softmax" and config.softmax_order == "after_topk")


def _check_shapes(
    logits_TE: Tensor, config: RouterConfig, bias_E: Tensor | None, valid_T: Tensor | None, ids_TK: Tensor | None
) -> None:
    tokens, experts = logits_TE.shape
    for name, tensor, shape in (
        ("the expert bias", bias_E, (experts,)),
        ("the validity of tokens", valid_T, (tokens,)),
        ("earlier choices", ids_TK, (tokens, config.top_k)),
    ):
        # A kernel would read what is not there.
        if tensor is not None and tensor.shape != shape:
            raise MoeKernelsError(
                f"{name} must have the shape {shape} with logits {(tokens, experts)} and top_k = {config.top_k}, not "
                f"{tuple(tensor.shape)}"
            )


class _Route(torch.autograd.Function):
    """`route` by Triton kernels: ids, weights, and the counts of experts with the number of bad rows behind them."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TE: Tensor,
        config: RouterConfig,
        bias_E: Tensor | None,
        valid_T: Tensor | None,
        ids_TK: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from moe_kernels.triton_kernels import routing as kernels

        ctx.rule = (config.score == "sigmoid", _over_chosen(config), config.scale)
        choice = (config.top_k, config.groups, config.group_top_k)
        ids_TK, probs_TK, counts = kernels.route(logits_TE, bias_E, valid_T, ids_TK, *choice, *ctx.rule)
        ctx.save_for_backward(logits_TE, ids_TK, probs_TK)
        ctx.mark_non_differentiable(ids_TK, counts)
        return ids_TK, probs_TK, counts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _ids: None, grad_TK: Tensor, _counts: None) -> tuple[Tensor | None, ...]:
        from moe_kernels.triton_kernels import routing as kernels

        return kernels.route_backward(grad_TK, *ctx.saved_tensors, *ctx.rule), None, None, None, None


class _Scores(torch.autograd.Function):
    """`scores` by Triton kernels."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, sigmoid: bool) -> Tensor:
        from moe_kernels.triton_kernels import losses as kernels

        ctx.sigmoid = sigmoid
        scores_TE: Tensor = kernels.scores(logits_TE, sigmoid)
        ctx.save_for_backward(logits_TE, scores_TE)
        return scores_TE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor, None]:
        from moe_kernels.triton_kernels import losses as kernels

        return kernels.scores_backward(grad_TE, *ctx.saved_tensors, ctx.sigmoid), None


_route: Callable[..., tuple[Tensor, Tensor, Tensor]] = _Route.apply
_scores: Callable[..., Tensor] = _Scores.apply
