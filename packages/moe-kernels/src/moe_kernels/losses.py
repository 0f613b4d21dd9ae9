"""Losses that keep experts balanced, and the node that attaches their gradient to a tensor.

Gradients flow through the scores only; load statistics are counts. A loss comes without its coefficient.
Shape legend: T tokens here, K choices per token, E experts, G segments (balance microbatches or pieces of documents).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_kernels.dtypes import internal_dtype
from moe_kernels.errors import MoeKernelsError
from moe_kernels.implementation import uses_triton
from moe_kernels.top_k import stable_top_k


def balance_loss(
    scores_TE: Tensor,
    ids_TK: Tensor,
    segment_T: Tensor,
    num_segments: int,
    *,
    valid_T: Tensor | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Auxiliary loss of each segment: E / (K T_g²) · sum_e n_ge · sum_t A_te (numerics §2), [G], internal dtype.

    n_ge are the choices of expert e and T_g the valid tokens of segment g. Uniform scores give 1; all tokens on one
    expert with K = 1 give up to E; a segment without a valid token gives 0. The host is not synchronised.

    Where several ranks share the segments, each gets its additive part: n and T are those of all ranks, t are the
    tokens here. The sum over the ranks is the loss, and gradients are those of that sum.

    Args:
        scores_TE: A, the full distribution of `scores`.
        ids_TK: choices to count; -1 is not counted.
        segment_T: int64, segment of each token, in [0, num_segments).
        num_segments: G.
        valid_T: bool, False for tokens that belong to no statistic.
        reduce: sums a tensor over the ranks that share the segments. It is called once, with a tensor of counts
            [G, E + 1] of its own to overwrite or not.

    Raises:
        MoeKernelsError: not a segment, choices and a validity for each token.
    """
    _check_tokens(scores_TE, ids_TK=ids_TK, segment_T=segment_T, valid_T=valid_T)
    return _balance_loss(scores_TE, ids_TK, segment_T, num_segments, valid_T, reduce)


def global_balance_loss(
    scores_TE: Tensor,
    counts_E: Tensor,
    count_tokens: int | Tensor,
    num_tokens: int | Tensor,
    top_k: int,
    *,
    valid_T: Tensor | None = None,
) -> Tensor:
    """This rank's additive part of the global balance loss: E / (K C N) · sum_e n_e · sum_t A_te, a scalar.

    Summed over all microbatches and ranks of a step it is the loss of the whole batch. The host is not synchronised.

    Args:
        scores_TE: A, the full distribution of `scores`.
        counts_E: n, choices of each expert in a window that holds C valid tokens.
        count_tokens: C.
        num_tokens: N, valid tokens of the whole step. A tensor gives the same bits, and a graph reads it anew.
        top_k: K.
        valid_T: bool, False for padding tokens.

    Raises:
        MoeKernelsError: a window or a step without tokens, or not as many counts as experts, or not as many validities
            as tokens.
    """
    if any(isinstance(count, int) and count < 1 for count in (num_tokens, count_tokens)):
        raise MoeKernelsError(
            f"the global balance loss needs tokens in its window and in its step, got {count_tokens} and {num_tokens}"
        )
    _check_tokens(scores_TE, valid_T=valid_T)
    if counts_E.shape != scores_TE.shape[1:]:
        raise MoeKernelsError(f"{scores_TE.shape[1]} experts have as many counts, not {tuple(counts_E.shape)} of them")
    factor = _share_of(scores_TE.shape[-1], top_k, num_tokens, scores_TE.dtype)
    if uses_triton(scores_TE):
        slope_E = counts_E.to(scores_TE.dtype) * factor / count_tokens
        return _weighted_scores(scores_TE, slope_E, valid_T)
    load_T = scores_TE @ counts_E.to(scores_TE.dtype)
    if valid_T is not None:
        load_T = load_T.masked_fill(~valid_T, 0)
    return load_T.sum() * factor / count_tokens


def _share_of(num_experts: int, top_k: int, num_tokens: int | Tensor, dtype: torch.dtype) -> float | Tensor:
    """E / (K N), rounded to the dtype once, as a product with a Python number rounds it."""
    if isinstance(num_tokens, int):
        return num_experts / (top_k * num_tokens)
    return (num_experts / (top_k * num_tokens.to(torch.float64))).to(dtype)


def plain_choices(scores_TE: Tensor, top_k: int) -> Tensor:
    """Plain top-k of the scores, int64 [T, K]: the choices without bias, groups, capacity or padding."""
    return stable_top_k(scores_TE, top_k)


def z_loss(logits_TE: Tensor) -> Tensor:
    """logsumexp(l)² of each token, [T], internal dtype; keeps router logits small (ST-MoE, arXiv 2202.08906)."""
    if uses_triton(logits_TE):
        return _z_loss(logits_TE)
    return torch.logsumexp(logits_TE.to(internal_dtype(logits_TE.dtype)), -1).square()


def inject_gradient(x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
    """x itself, such that a backward pass through it also starts one at `loss` with the gradient `scale`.

    So a loss computed deep inside a model joins the objective with weight `scale` without leaving the layer. The
    gradient of x passes through unchanged. The returned tensor must be used in x's place.

    Args:
        x: any tensor on the path to the objective.
        loss: scalar or vector.
        scale: number, or tensor that broadcasts to the loss.
    """
    return _inject_gradient(x, loss, scale)


def _check_tokens(scores_TE: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        # A kernel would read what is not there.
        if tensor is not None and tensor.shape[0] != scores_TE.shape[0]:
            raise MoeKernelsError(f"{scores_TE.shape[0]} tokens have scores, and {tensor.shape[0]} have {name}")


class _BalanceLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores_TE: Tensor,
        ids_TK: Tensor,
        segment_T: Tensor,
        num_segments: int,
        valid_T: Tensor | None,
        reduce: Callable[[Tensor], Tensor] | None,
    ) -> Tensor:
        num_experts, top_k = scores_TE.shape[-1], ids_TK.shape[-1]
        ctx.triton = uses_triton(scores_TE)
        if ctx.triton:
            from moe_kernels.triton_kernels import losses as kernels

            statistics = kernels.segment_counts(ids_TK, segment_T, valid_T, num_segments, num_experts)
            if reduce is not None:
                statistics = reduce(statistics)
            slope_GE = kernels.balance_slope(statistics, num_experts / top_k)
            ctx.save_for_backward(slope_GE, segment_T, valid_T)
            loss_G: Tensor = kernels.weighted_scores(scores_TE, slope_GE, segment_T, valid_T)
            return loss_G
        segments = torch.arange(num_segments, device=segment_T.device)
        member_GT = segment_T == segments[:, None]
        chosen_TK = ids_TK >= 0
        if valid_T is not None:
            member_GT &= valid_T
            chosen_TK = chosen_TK & valid_T[:, None]
            # A zero in the membership does not stop a NaN.
            scores_TE = scores_TE.masked_fill(~valid_T[:, None], 0)
        # Integers, so the order in which they are added does not matter; uncounted choices go to one extra bin.
        bin_TK = torch.where(chosen_TK, segment_T[:, None] * num_experts + ids_TK, num_segments * num_experts)
        counts = torch.zeros(num_segments * num_experts + 1, dtype=torch.int64, device=ids_TK.device)
        counts.scatter_add_(0, bin_TK.view(-1), torch.ones_like(bin_TK).view(-1))
        # A product with the membership rather than an indexed sum: it adds in a fixed order on every device.
        sums_GE = member_GT.to(scores_TE.dtype) @ scores_TE
        tokens_G1 = member_GT.sum(-1, keepdim=True)
        statistics = torch.cat((counts[:-1].view(num_segments, -1), tokens_G1), -1)
        if reduce is not None:
            statistics = reduce(statistics)
        counts_GE, tokens_G1 = torch.split(statistics.to(scores_TE.dtype), [num_experts, 1], -1)
        slope_GE = counts_GE * (num_experts / top_k) / tokens_G1.square().clamp(min=1)
        ctx.save_for_backward(slope_GE, segment_T, valid_T)
        return (slope_GE * sums_GE).sum(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_G: Tensor) -> tuple[Tensor | None, ...]:
        slope_GE, segment_T, valid_T = ctx.saved_tensors
        if ctx.triton:
            from moe_kernels.triton_kernels import losses as kernels

            grad_TE = kernels.weighted_scores_backward(grad_G, slope_GE, segment_T, valid_T, segment_T.shape[0])
            return grad_TE, None, None, None, None, None
        grad_TE = (slope_GE * grad_G[:, None]).index_select(0, segment_T)
        if valid_T is not None:
            grad_TE.masked_fill_(~valid_T[:, None], 0)
        return grad_TE, None, None, None, None, None


_balance_loss: Callable[..., Tensor] = _BalanceLoss.apply


class _WeightedScores(torch.autograd.Function):
    """sum over valid t and over e of slope_e * scores_te, by Triton kernels."""

    @staticmethod
    def forward(ctx: Any, scores_TE: Tensor, slope_E: Tensor, valid_T: Tensor | None) -> Tensor:
        from moe_kernels.triton_kernels import losses as kernels

        ctx.tokens = scores_TE.shape[0]
        ctx.save_for_backward(slope_E, valid_T)
        loss_G: Tensor = kernels.weighted_scores(scores_TE, slope_E[None], None, valid_T)
        return loss_G[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from moe_kernels.triton_kernels import losses as kernels

        slope_E, valid_T = ctx.saved_tensors
        return kernels.weighted_scores_backward(grad[None], slope_E[None], None, valid_T, ctx.tokens), None, None


_weighted_scores: Callable[..., Tensor] = _WeightedScores.apply


class _ZLoss(torch.autograd.Function):
    """`z_loss` by Triton kernels."""

    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor) -> Tensor:
        from moe_kernels.triton_kernels import losses as kernels

        loss_T: Tensor
        loss_T, lse_T = kernels.z_loss(logits_TE)
        ctx.save_for_backward(logits_TE, lse_T)
        return loss_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> Tensor:
        from moe_kernels.triton_kernels import losses as kernels

        dlogits_TE: Tensor = kernels.z_loss_backward(grad_T, *ctx.saved_tensors)
        return dlogits_TE


_z_loss: Callable[..., Tensor] = _ZLoss.apply


class _InjectGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float | Tensor) -> Tensor:
        # Filled and not copied from the host, which a capture in a CUDA graph refuses.
        ctx.scale = scale.to(loss) if isinstance(scale, Tensor) else loss.new_full((), scale)
        ctx.scale = ctx.scale.expand_as(loss)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, ctx.scale, None


_inject_gradient: Callable[..., Tensor] = _InjectGradient.apply
