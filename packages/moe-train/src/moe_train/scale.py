"""`StepScale`: the global counts of a step, and from them the weight of every term of the loss.

A step minimises one scalar that is defined without reference to any layout (numerics §0):

    L = sum CE / N_tgt + sum over layers [ c_aux mean_m aux(m) + c_seq mean_s seq(s) + c_glob glob + c_z sum z / N_tok ]

The counts are known from the data before the first forward. A microbatch adds its terms times the weights given here;
nothing is divided later. This is the only place that knows how losses are normalised.

Shape legend: B sequences, S slots per sequence, T = B*S tokens of an execution microbatch, M balance microbatches,
G segments, L layers, E experts.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from moe_parallel import Groups, all_reduce
from moe_train.choices import MicrobatchChoices
from moe_train.data.batch import Batch


@dataclass(frozen=True, kw_only=True)
class LoadWindow:
    """The expert load of an earlier step, against which the global balance loss is computed.

    Attributes:
        counts_LE: choices per layer and expert over the whole window.
        num_tokens: valid tokens of the window.
    """

    counts_LE: Tensor
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class MicrobatchScale:
    """Weights of the terms that one execution microbatch contributes to the loss of the step.

    Attributes:
        target_weight_T: of each target's cross-entropy; zero where masked.
        valid_T: bool, non-padding tokens.
        token_weight_T: of each token's z-loss; zero for padding.
        balance_T: int64, which balance microbatch (of this execution microbatch) a token belongs to.
        balance_weight_M: of each balance microbatch's auxiliary loss.
        segment_T: int64, which segment a token belongs to.
        segment_weight_G: of each segment's sequence loss.
        num_tokens: N_tok, valid tokens of the whole step.
        window: load of the previous step for the global balance loss; None where that loss is not used.
        choices: what routers repeat or leave behind; None where they do neither.
    """

    target_weight_T: Tensor
    valid_T: Tensor
    token_weight_T: Tensor
    balance_T: Tensor
    balance_weight_M: Tensor
    segment_T: Tensor
    segment_weight_G: Tensor
    num_tokens: int
    window: LoadWindow | None
    choices: MicrobatchChoices | None


@dataclass(frozen=True, kw_only=True)
class StepScale:
    """Counts of one step over all ranks, all known on the host.

    Attributes:
        num_targets: N_tgt, targets that count.
        num_tokens: N_tok, non-padding tokens.
        num_segments: S, segments with a valid token.
        num_balance: M, balance microbatches with a valid token.
        num_target_balance: balance microbatches with a target that counts.
        balance_sequences: B, sequences of a balance microbatch.
        loss_norm: `token`: every token weighs the same; `microbatch`: mean over balance microbatches of their means.
    """

    num_targets: int
    num_tokens: int
    num_segments: int
    num_balance: int
    num_target_balance: int
    balance_sequences: int
    loss_norm: Literal["token", "microbatch"]

    @classmethod
    def count(cls, batch: Batch, *, balance_sequences: int, loss_norm: Literal["token", "microbatch"]) -> "StepScale":
        """Count a batch, or one rank's share of it (`over`). Reads the masks on the host, once per step."""
        valid_B = batch.valid_BS.sum(1)
        target_B = batch.target_mask_BS.sum(1)
        balance_B = torch.arange(batch.num_sequences, device=valid_B.device) // balance_sequences
        return cls(
            num_targets=int(target_B.sum()),
            num_tokens=int(valid_B.sum()),
            num_segments=int((valid_B > 0).sum()),
            num_balance=_occupied(balance_B, valid_B),
            num_target_balance=_occupied(balance_B, target_B),
            balance_sequences=balance_sequences,
            loss_norm=loss_norm,
        )

    def over(self, groups: Groups) -> "StepScale":
        """The counts of the whole step from those of each rank's share. Collective over `dp`; on the host.

        Shares consist of whole balance microbatches, so every count is a sum.
        """
        group = groups.group("dp")
        if group is None:
            return self
        names = ("num_targets", "num_tokens", "num_segments", "num_balance", "num_target_balance")
        counts = all_reduce(torch.tensor([getattr(self, name) for name in names]), group).wait().tolist()
        return replace(self, **dict(zip(names, counts, strict=True)))

    def microbatch(
        self,
        batch: Batch,
        dtype: torch.dtype,
        window: LoadWindow | None = None,
        choices: MicrobatchChoices | None = None,
    ) -> MicrobatchScale:
        """Weights for an execution microbatch, in the given (internal) dtype.

        It must start at a multiple of `balance_sequences` of the global order, so that it holds whole balance
        microbatches. Terms that do not exist (no target, no token) get weight zero, never a division by zero.
        """
        rows, slots = batch.token_BS.shape
        row_T = torch.arange(rows, device=batch.token_BS.device).repeat_interleave(slots)
        balance_T = row_T // self.balance_sequences
        num_balance = -(-rows // self.balance_sequences)
        valid_T = batch.valid_BS.reshape(-1)
        target_T = batch.target_mask_BS.reshape(-1)

        valid_M = _sum_by(valid_T, balance_T, num_balance, dtype)
        valid_B = _sum_by(valid_T, row_T, rows, dtype)
        if self.loss_norm == "token":
            target_weight_T = target_T.to(dtype) / max(self.num_targets, 1)
            token_weight_T = valid_T.to(dtype) / max(self.num_tokens, 1)
            segment_weight_B = (valid_B > 0).to(dtype) / max(self.num_segments, 1)
        else:
            target_M = _sum_by(target_T, balance_T, num_balance, dtype)
            target_weight_T = target_T / (max(self.num_target_balance, 1) * target_M.clamp(min=1))[balance_T]
            token_weight_T = valid_T / (max(self.num_balance, 1) * valid_M.clamp(min=1))[balance_T]
            balance_B = torch.arange(rows, device=valid_B.device) // self.balance_sequences
            segments_M = _sum_by(valid_B > 0, balance_B, num_balance, dtype)
            segment_weight_B = (valid_B > 0) / (max(self.num_balance, 1) * segments_M.clamp(min=1))[balance_B]
        return MicrobatchScale(
            target_weight_T=target_weight_T,
            valid_T=valid_T,
            token_weight_T=token_weight_T,
            balance_T=balance_T,
            balance_weight_M=(valid_M > 0).to(dtype) / max(self.num_balance, 1),
            segment_T=row_T,
            segment_weight_G=segment_weight_B,
            num_tokens=self.num_tokens,
            window=window,
            choices=choices,
        )


def _occupied(group_B: Tensor, count_B: Tensor) -> int:
    return len(set(group_B[count_B > 0].tolist()))


def _sum_by(flag_T: Tensor, group_T: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    # Sums of ones are exact, so the order of accumulation does not matter.
    return torch.zeros(num_groups, dtype=dtype, device=flag_T.device).index_add_(0, group_T, flag_T.to(dtype))
