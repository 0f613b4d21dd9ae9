"""Cross-entropy per target, without a copy of the logits in the internal dtype.

Shape legend: T tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moe_kernels.dtypes import internal_dtype
from moe_kernels.errors import MoeKernelsError
from moe_kernels.implementation import uses_triton
from moe_kernels.passes import row_slices


def cross_entropy(
    logits_TV: Tensor, targets_T: Tensor, *, valid_T: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """-log softmax(logits)[target] of each token, loss_T in the internal dtype; equals `F.cross_entropy`.

    Args:
        logits_TV: any float dtype; kept for the backward pass as it is, nothing else of that size is.
        targets_T: int64 in [0, V); anything where invalid.
        valid_T: bool, False for tokens without a target: loss 0 and no gradient, whatever their logits.
        label_smoothing: share e of the target's probability that is spread evenly over the vocabulary:
            (1 - e) CE(target) + e mean over v of CE(v).

    Raises:
        MoeKernelsError: `label_smoothing` outside [0, 1], or not a target (and a validity) for each token.
        RuntimeError: a valid target outside [0, V), on a CPU. A Triton kernel gives it a loss of NaN.
    """
    if not 0 <= label_smoothing <= 1:
        raise MoeKernelsError(f"label_smoothing is a share between 0 and 1, not {label_smoothing}")
    # A kernel would read what is not there.
    tokens = logits_TV.shape[0]
    if targets_T.shape[0] != tokens or (valid_T is not None and valid_T.shape[0] != tokens):
        valid = "" if valid_T is None else f" and {tuple(valid_T.shape)} of valid"
        raise MoeKernelsError(
            f"logits {tuple(logits_TV.shape)} have a target for each row, not {tuple(targets_T.shape)} of them{valid}"
        )
    return _cross_entropy(logits_TV, targets_T, valid_T, label_smoothing)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TV: Tensor, targets_T: Tensor, valid_T: Tensor | None, label_smoothing: float
    ) -> Tensor:
        ctx.label_smoothing = label_smoothing
        ctx.triton = uses_triton(logits_TV)
        loss_T: Tensor
        if ctx.triton:
            from moe_kernels.triton_kernels import cross_entropy as kernels

            loss_T, max_T, sum_T = kernels.cross_entropy(logits_TV, targets_T, valid_T, label_smoothing)
            ctx.save_for_backward(logits_TV, targets_T, valid_T, max_T, sum_T)
            return loss_T
        if valid_T is not None:
            targets_T = targets_T.masked_fill(~valid_T, 0)
        ctx.save_for_backward(logits_TV, targets_T, valid_T)
        internal = internal_dtype(logits_TV.dtype)
        loss_T = logits_TV.new_empty(logits_TV.shape[0], dtype=internal)
        for rows in row_slices(logits_TV):
            log_probs = torch.log_softmax(logits_TV[rows], -1, dtype=internal)
            loss = log_probs.gather(-1, targets_T[rows, None])[:, 0]
            if label_smoothing:
                loss = torch.lerp(loss, log_probs.mean(-1), label_smoothing)
            torch.neg(loss, out=loss_T[rows])
        return loss_T if valid_T is None else loss_T.masked_fill_(~valid_T, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.triton:
            from moe_kernels.triton_kernels import cross_entropy as kernels

            return kernels.cross_entropy_backward(grad_T, *ctx.saved_tensors, ctx.label_smoothing), None, None, None
        logits_TV, targets_T, valid_T = ctx.saved_tensors
        dlogits_TV = logits_TV.new_empty(logits_TV.shape)
        smoothing = ctx.label_smoothing
        for rows in row_slices(logits_TV):
            grad = torch.softmax(logits_TV[rows], -1, dtype=grad_T.dtype)
            if smoothing:
                grad.sub_(smoothing / logits_TV.shape[-1])
            # One target per row, so no place is written twice.
            grad.scatter_add_(-1, targets_T[rows, None], grad.new_full((grad.shape[0], 1), smoothing - 1))
            torch.mul(grad, grad_T[rows, None], out=dlogits_TV[rows])
        # A zero gradient does not stop a NaN in the logits of a token without target.
        return dlogits_TV if valid_T is None else dlogits_TV.masked_fill_(~valid_T[:, None], 0), None, None, None


_cross_entropy: Callable[..., Tensor] = _CrossEntropy.apply
