"""`StepScale`: the global counts of a step, and from them the weight of every term of the loss.

A step minimises one scalar that is defined without reference to any layout (numerics §0):

    L = sum CE / N_tgt + sum over layers [ c_aux mean_m aux(m) + c_seq mean_s seq(s) + c_glob glob + c_z sum z / N_tok ]
        + sum over depths d of multi-token prediction [ lambda / D sum CE_d / N_d ]

The counts are known from the data before the first forward. A microbatch adds its terms times the weights given here;
nothing is divided later. This is the only place that knows how losses are normalised.

Shape legend: B sequences, S slots per sequence, T = B*S tokens of an execution microbatch, M balance microbatches,
G segments (documents of a row, or rows where documents are not kept apart), L layers with a router, E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from moe_kernels import TokenRandom
from moe_parallel import Groups, all_reduce
from moe_train.choices import MicrobatchChoices
from moe_train.data.batch import Ahead, Batch
from moe_train.data.tokens import TokenPart


@dataclass(frozen=True, kw_only=True)
class LoadWindow:
    """The expert load of an earlier step, against which the global balance loss is computed.

    Attributes:
        counts_LE: choices per layer and expert over the whole window.
        num_tokens: valid tokens of the window.
    """

    counts_LE: Tensor
    num_tokens: int | Tensor


@dataclass(frozen=True, kw_only=True)
class AheadScale:
    """What one depth of multi-token prediction reads and predicts in an execution microbatch.

    Attributes:
        ahead: tokens and targets.
        target_weight_T: of each target's cross-entropy; sums to one over the step, zero where masked.
    """

    ahead: Ahead
    target_weight_T: Tensor


@dataclass(frozen=True, kw_only=True)
class RoutingScale:
    """What routers need to know of the tokens of an execution microbatch that they see on this rank.

    Attributes:
        valid_T: bool, non-padding tokens.
        token_weight_T: of each token's z-loss; zero for padding.
        balance_T: int64, which balance microbatch (of this execution microbatch) a token belongs to.
        balance_weight_M: of each balance microbatch's auxiliary loss.
        segment_T: int64, which segment a token belongs to.
        segment_weight_G: of each segment's sequence loss.
        num_tokens: N_tok, valid tokens of the whole step.
        window: load of the previous step for the global balance loss; None where that loss is not used.
        choices: what routers repeat or leave behind; None where they do neither.
        random: what the tokens draw.
        reduce: sums a tensor over the ranks that share the balance microbatches; None where this rank has them whole.
    """

    valid_T: Tensor
    token_weight_T: Tensor
    balance_T: Tensor
    balance_weight_M: Tensor
    segment_T: Tensor
    segment_weight_G: Tensor
    num_tokens: int | Tensor
    window: LoadWindow | None
    choices: MicrobatchChoices | None
    random: TokenRandom
    reduce: Callable[[Tensor], Tensor] | None = None

    def with_tensors(self) -> "RoutingScale":
        """The same, with tensors of one number for what changes from step to step: a graph reads these anew."""

        def number(value: int | Tensor) -> Tensor:
            if isinstance(value, Tensor):
                return value
            # Filled and not copied from the host, for which a device would be waited for.
            return torch.full((), value, dtype=torch.int64, device=self.valid_T.device)

        window = None if self.window is None else replace(self.window, num_tokens=number(self.window.num_tokens))
        random = replace(self.random, step=number(self.random.step))
        return replace(self, num_tokens=number(self.num_tokens), window=window, random=random)


@dataclass(frozen=True, kw_only=True)
class MicrobatchScale:
    """Weights of the terms that the tokens of an execution microbatch contribute to the loss of the step.

    Attributes:
        target_weight_T: of each target's cross-entropy; zero where masked.
        ahead: one entry for each depth of multi-token prediction.
        routing: for the routers.
    """

    target_weight_T: Tensor
    ahead: tuple[AheadScale, ...]
    routing: RoutingScale

    def of(self, part: TokenPart) -> "MicrobatchScale":
        """The same for the tokens of this rank, from that for whole rows."""
        routing, group = self.routing, part.groups.group("tp", part.axis)
        return MicrobatchScale(
            target_weight_T=part.held(self.target_weight_T),
            ahead=tuple(
                AheadScale(ahead=depth.ahead.each(part.rows), target_weight_T=part.held(depth.target_weight_T))
                for depth in self.ahead
            ),
            routing=replace(
                routing,
                valid_T=part.routed(routing.valid_T),
                token_weight_T=part.routed(routing.token_weight_T),
                balance_T=part.routed(routing.balance_T),
                segment_T=part.routed(routing.segment_T),
                random=replace(routing.random, index_T=part.routed(routing.random.index_T)),
                choices=None if routing.choices is None else replace(routing.choices, part=part),
                reduce=None if group is None else lambda tensor: all_reduce(tensor, group).wait(),
            ),
        )


@dataclass(frozen=True, kw_only=True)
class TargetCount:
    """How many targets a step has over all ranks, and how many balance microbatches hold one."""

    targets: int = 0
    balance: int = 0

    def plus(self, mask_BS: Tensor, balance_B: Tensor) -> "TargetCount":
        """And those of more rows, which belong to these balance microbatches."""
        target_B = mask_BS.sum(1)
        return TargetCount(
            targets=self.targets + int(target_B.sum()), balance=self.balance + _occupied(balance_B, target_B)
        )


@dataclass(frozen=True, kw_only=True)
class StepScale:
    """Counts of one step over all ranks, all known on the host.

    Attributes:
        targets: N_tgt, targets that count.
        ahead: the same for each depth of multi-token prediction.
        num_tokens: N_tok, non-padding tokens.
        num_segments: S, segments with a valid token.
        num_balance: M, balance microbatches with a valid token.
        balance_sequences: B, sequences of a balance microbatch.
        loss_norm: `token`: every token weighs the same; `microbatch`: mean over balance microbatches of their means.
    """

    targets: TargetCount
    ahead: tuple[TargetCount, ...]
    num_tokens: int
    num_segments: int
    num_balance: int
    balance_sequences: int
    loss_norm: Literal["token", "microbatch"]

    @classmethod
    def count(
        cls,
        batches: Sequence[Batch],
        *,
        balance_sequences: int,
        loss_norm: Literal["token", "microbatch"],
        depths: int = 0,
    ) -> "StepScale":
        """Count execution microbatches, all of a step or those of one rank (`over`). Reads the masks on the host, once
        per step.

        `depths` is the number of tokens that are predicted beyond the next one.
        """
        targets, ahead = TargetCount(), [TargetCount() for _ in range(depths)]
        num_tokens = num_segments = num_balance = 0
        for batch in batches:
            valid_B = batch.valid_BS.sum(1)
            balance_B = torch.arange(batch.num_sequences, device=valid_B.device) // balance_sequences
            targets = targets.plus(batch.target_mask_BS, balance_B)
            ahead = [
                count.plus(batch.ahead(depth).target_mask_BS, balance_B) for depth, count in enumerate(ahead, start=1)
            ]
            num_tokens += int(valid_B.sum())
            num_balance += _occupied(balance_B, valid_B)
            row_segments = most_segments(batch)
            segment_T = _segments(batch, row_segments)
            held_G = _sum_by(batch.valid_BS.reshape(-1), segment_T, batch.num_sequences * row_segments, torch.int64)
            num_segments += int((held_G > 0).sum())
        return cls(
            targets=targets,
            ahead=tuple(ahead),
            num_tokens=num_tokens,
            num_segments=num_segments,
            num_balance=num_balance,
            balance_sequences=balance_sequences,
            loss_norm=loss_norm,
        )

    def over(self, groups: Groups) -> "StepScale":
        """The counts of the whole step from those of each rank's share. Collective over `cp` and `dp`; on the host.

        Of the ranks that share rows only one may have counted them. Shares consist of whole balance microbatches, so
        every count is a sum.
        """
        group = groups.group("cp", "dp")
        if group is None:
            return self
        names = ("num_tokens", "num_segments", "num_balance")
        pairs = [count for target in (self.targets, *self.ahead) for count in (target.targets, target.balance)]
        packed = torch.tensor([*(getattr(self, name) for name in names), *pairs])
        counts = all_reduce(packed, group).wait().tolist()
        sums, pairs = counts[: len(names)], counts[len(names) :]
        targets, *ahead = (
            TargetCount(targets=number, balance=balance)
            for number, balance in zip(pairs[::2], pairs[1::2], strict=True)
        )
        return replace(self, targets=targets, ahead=tuple(ahead), **dict(zip(names, sums, strict=True)))

    def microbatch(
        self,
        batch: Batch,
        dtype: torch.dtype,
        window: LoadWindow | None = None,
        choices: MicrobatchChoices | None = None,
        row_segments: int | None = None,
        seed: int = 0,
        step: int = 0,
    ) -> MicrobatchScale:
        """Weights for the whole rows of an execution microbatch, in the given (internal) dtype.

        The host reads `row_segments` (`most_segments`) from the batch unless it is given. What tokens draw depends on
        `seed` and `step`.
        It must start at a multiple of `balance_sequences` of the global order, so that it holds whole balance
        microbatches. Terms that do not exist (no target, no token) get weight zero, never a division by zero.
        """
        rows, slots = batch.token_BS.shape
        row_segments = most_segments(batch) if row_segments is None else row_segments
        row_T = torch.arange(rows, device=batch.token_BS.device).repeat_interleave(slots)
        balance_T = row_T // self.balance_sequences
        num_balance = -(-rows // self.balance_sequences)
        valid_T = batch.valid_BS.reshape(-1)
        segment_T, num_segments = _segments(batch, row_segments), rows * row_segments

        valid_M = _sum_by(valid_T, balance_T, num_balance, dtype)
        held_G = _sum_by(valid_T, segment_T, num_segments, dtype) > 0
        if self.loss_norm == "token":
            token_weight_T = valid_T.to(dtype) / max(self.num_tokens, 1)
            segment_weight_G = held_G.to(dtype) / max(self.num_segments, 1)
        else:
            token_weight_T = valid_T / (max(self.num_balance, 1) * valid_M.clamp(min=1))[balance_T]
            row_G = torch.arange(num_segments, device=valid_T.device) // row_segments
            balance_G = row_G // self.balance_sequences
            segments_M = _sum_by(held_G, balance_G, num_balance, dtype)
            segment_weight_G = held_G / (max(self.num_balance, 1) * segments_M.clamp(min=1))[balance_G]

        def target_weight(mask_BS: Tensor, count: TargetCount) -> Tensor:
            mask_T = mask_BS.reshape(-1)
            if self.loss_norm == "token":
                return mask_T.to(dtype) / max(count.targets, 1)
            mask_M = _sum_by(mask_T, balance_T, num_balance, dtype)
            return mask_T / (max(count.balance, 1) * mask_M.clamp(min=1))[balance_T]

        ahead = [batch.ahead(depth + 1) for depth in range(len(self.ahead))]
        return MicrobatchScale(
            target_weight_T=target_weight(batch.target_mask_BS, self.targets),
            routing=RoutingScale(
                valid_T=valid_T,
                token_weight_T=token_weight_T,
                balance_T=balance_T,
                balance_weight_M=(valid_M > 0).to(dtype) / max(self.num_balance, 1),
                segment_T=segment_T,
                segment_weight_G=segment_weight_G,
                num_tokens=self.num_tokens,
                window=window,
                choices=choices,
                random=TokenRandom(seed=seed, step=step, index_T=batch.token_index_BS.reshape(-1)),
            ),
            ahead=tuple(
                AheadScale(ahead=part, target_weight_T=target_weight(part.target_mask_BS, count))
                for part, count in zip(ahead, self.ahead, strict=True)
            ),
        )


def most_segments(batch: Batch) -> int:
    """Most documents of a row; 1 where a row is one document. Reads the host."""
    return 1 if batch.document_BS is None else int(batch.document_BS.max()) + 1


def _segments(batch: Batch, row_segments: int) -> Tensor:
    """Segment of each token, [T]: row * row_segments + number of the document inside its row."""
    rows, slots = batch.token_BS.shape
    row_B1 = torch.arange(rows, device=batch.token_BS.device)[:, None]
    segment_BS = (row_B1 * row_segments).expand(rows, slots)
    return (segment_BS if batch.document_BS is None else segment_BS + batch.document_BS).reshape(-1)


def _occupied(group_B: Tensor, count_B: Tensor) -> int:
    return len(set(group_B[count_B > 0].tolist()))


def _sum_by(flag_T: Tensor, group_T: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    # Sums of ones are exact, so the order of accumulation does not matter.
    return torch.zeros(num_groups, dtype=dtype, device=flag_T.device).index_add_(0, group_T, flag_T.to(dtype))
