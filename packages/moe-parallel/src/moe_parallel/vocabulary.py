"""A vocabulary that is split over ranks: embedding and cross-entropy.

Shape legend: T tokens, V vocabulary of this rank, D features, W ranks.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from moe_parallel.collectives import all_gather
from moe_parallel.errors import MoeParallelError
from moe_parallel.precision import internal_dtype

# Rows go through the passes in pieces of about so many elements, which bounds what is held in the internal dtype.
_PASS_ELEMENTS = 2**22


class VocabularyEmbedding(nn.Module):
    """An embedding that holds consecutive rows of the table; what it looks up elsewhere is zero.

    The sum over the ranks is the embedding. An id outside the whole table is refused as by `nn.Embedding`.

    Args:
        weight: [V, D], the rows of this rank when it is called; until then it may be the whole table.
        first: number of the first of them in the whole table.
        rows: how many they are.
        vocab_size: rows of the whole table.
    """

    def __init__(self, weight: Tensor, *, first: int, rows: int, vocab_size: int) -> None:
        super().__init__()
        self.weight = weight
        self.first = first
        self.rows = rows
        self.vocab_size = vocab_size

    def forward(self, token: Tensor) -> Tensor:
        """Features [.., D] of tokens [..]."""
        if self.weight.shape[0] != self.rows:
            raise MoeParallelError(
                f"the weight has {self.weight.shape[0]} rows, but this rank's part of the vocabulary {self.rows}; the "
                "plan must split dim 0 of it over the same axis, unevenly"
            )
        row = token - self.first
        here = (row >= 0) & (row < self.rows)
        elsewhere = (token >= 0) & (token < self.vocab_size) & ~here
        # A token of another rank reads row 0, of which neither value nor gradient remains, be they finite or not.
        return F.embedding(row.masked_fill(elsewhere, 0), self.weight).masked_fill(~here.unsqueeze(-1), 0)

    def extra_repr(self) -> str:
        return f"{self.rows} of {self.vocab_size}, {self.weight.shape[1]}, first={self.first}"


def vocabulary_cross_entropy(
    logits_TV: Tensor,
    targets_T: Tensor,
    group: ProcessGroup | None,
    *,
    first: int,
    vocab_size: int,
    valid_T: Tensor | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """-log softmax(logits)[target] of each token, loss_T on every rank of the group; equals `F.cross_entropy`.

    One all-gather of three numbers per token and rank; backward does not communicate. Computed in at least float32.

    Args:
        logits_TV: of this rank's part of the vocabulary; kept for the backward pass as it is.
        targets_T: int64 in the whole vocabulary, else the loss is infinite; anything where invalid.
        group: the ranks that hold the parts, in the order of the vocabulary.
        first: number of the first entry of this rank's part.
        vocab_size: entries of the whole vocabulary, at least one for each rank.
        valid_T: bool, False for tokens without a target: loss 0 and no gradient, whatever their logits.
        label_smoothing: share e of the target's probability that is spread evenly over the vocabulary:
            (1 - e) CE(target) + e mean over v of CE(v).

    Raises:
        MoeParallelError: `label_smoothing` outside [0, 1].
    """
    if not 0 <= label_smoothing <= 1:
        raise MoeParallelError(f"label_smoothing is a share between 0 and 1, not {label_smoothing}")
    return _cross_entropy(logits_TV, targets_T, valid_T, group, first, vocab_size, label_smoothing)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        targets_T: Tensor,
        valid_T: Tensor | None,
        group: ProcessGroup | None,
        first: int,
        vocab_size: int,
        label_smoothing: float,
    ) -> Tensor:
        internal = internal_dtype(logits_TV.dtype)
        tokens, here = logits_TV.shape
        row_T = targets_T - first
        is_here_T = (row_T >= 0) & (row_T < here)
        row_T = row_T.where(is_here_T, 0)
        # Of each token: log of the sum of exponentials, logit of the target, sum of logits.
        parts_T3 = logits_TV.new_zeros(tokens, 3, dtype=internal)
        parts_T3[:, :2] = -torch.inf
        for rows in _row_slices(tokens, here):
            logits = logits_TV[rows].to(internal)
            parts_T3[rows, 0] = torch.logsumexp(logits, -1)
            target = logits.gather(-1, row_T[rows, None])[:, 0]
            parts_T3[rows, 1] = target.masked_fill_(~is_here_T[rows], -torch.inf)
            if label_smoothing:
                parts_T3[rows, 2] = logits.sum(-1)
        if group is not None:
            parts_WT3 = all_gather(parts_T3, group).wait().view(group.size(), tokens, 3)
        else:
            parts_WT3 = parts_T3.unsqueeze(0)
        partition_T = torch.logsumexp(parts_WT3[:, :, 0], 0)
        # One rank has the target.
        target_T, sum_T = parts_WT3[:, :, 1].amax(0), parts_WT3[:, :, 2].sum(0)
        loss_T = partition_T - (1 - label_smoothing) * target_T - label_smoothing / vocab_size * sum_T
        if label_smoothing == 1:  # 0 * -inf is no number
            loss_T.masked_fill_(target_T == -torch.inf, torch.inf)
        ctx.save_for_backward(logits_TV, row_T, is_here_T, valid_T, partition_T)
        ctx.label_smoothing, ctx.vocab_size = label_smoothing, vocab_size
        return loss_T if valid_T is None else loss_T.masked_fill_(~valid_T, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        logits_TV, row_T, is_here_T, valid_T, partition_T = ctx.saved_tensors
        dlogits_TV = logits_TV.new_empty(logits_TV.shape)
        smoothing = ctx.label_smoothing
        for rows in _row_slices(*logits_TV.shape):
            grad = torch.exp(logits_TV[rows].to(grad_T.dtype) - partition_T[rows, None])
            if smoothing:
                grad.sub_(smoothing / ctx.vocab_size)
            # One target per row, so no place is written twice.
            grad.scatter_add_(-1, row_T[rows, None], is_here_T[rows, None].to(grad.dtype) * (smoothing - 1))
            torch.mul(grad, grad_T[rows, None], out=dlogits_TV[rows])
        if valid_T is not None:
            # A zero gradient does not stop a NaN in the logits of a token without target.
            dlogits_TV.masked_fill_(~valid_T[:, None], 0)
        return dlogits_TV, None, None, None, None, None, None


_cross_entropy: Callable[..., Tensor] = _CrossEntropy.apply


def _row_slices(rows: int, columns: int) -> Iterator[slice]:
    step = max(_PASS_ELEMENTS // columns, 1)
    for start in range(0, rows, step):
        yield slice(start, start + step)
