"""`TokenSplit`: which tokens of an execution microbatch a rank works on, of those that its data-parallel rank has.

Rows are spread over `cp`, or over another axis of ranks that share them: every rank of it has some slots of every row.
What it has is a list of tokens, of which each rank of `tp` routes a consecutive part. Both need rows of a fitting
length, so that rows are padded first.

Shape legend: B rows, R slots of a whole row, S slots of it on this rank, T tokens of a list, W ranks of `tp` and of the
axis.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_kernels import CapacityGroup
from moe_parallel import ContextSplit, Groups, SequenceInfo, all_gather
from moe_parallel.context.balance import join_slots, padded_slots, select_slots, split_context
from moe_train.data.batch import Batch


def padded_row(slots: int, ranks: int, tp: int) -> int:
    """Slots of the shortest row that holds so many, and that so many ranks and those of `tp` can share evenly."""
    return padded_slots(slots, ranks, tp) if ranks > 1 else -(-slots // tp) * tp


@dataclass(frozen=True)
class TokenSplit:
    """How this rank shares microbatches with those of its `tp` group and of the group that shares the rows."""

    groups: Groups

    def padded(self, batch: Batch, axis: str = "cp") -> Batch:
        """The batch with rows that can be split over the ranks of an axis and of `tp`."""
        tp, cp = self.groups.size("tp"), self.groups.size(axis)
        return batch.padded(padded_row(batch.token_BS.shape[1], cp, tp))

    def of(self, batch: Batch, axis: str = "cp", *, slots: int | None = None) -> "TokenPart":
        """This rank's part of a padded batch; collective over nothing, the same on all ranks of a row.

        `slots` are those of a row before it was padded, by default as many as it has.
        """
        group, context = self.groups.group(axis), None
        if group is not None:
            rows, padded = batch.token_BS.shape
            context = split_context(group, rows, padded, batch.document_BS, device=batch.token_BS.device)
        shape = batch.token_BS.shape
        slots = shape[1] if slots is None else slots
        return TokenPart(groups=self.groups, axis=axis, shape=shape, slots=slots, context=context)


@dataclass(frozen=True, kw_only=True)
class TokenPart:
    """What a rank has of the rows of one microbatch.

    Attributes:
        groups: of this rank.
        axis: of them, whose ranks share every row.
        shape: [B, R] of the whole rows.
        slots: of a row before it was padded to be split.
        context: which slots each of these ranks has; None where this rank has whole rows.
    """

    groups: Groups
    axis: str = "cp"
    shape: torch.Size
    slots: int
    context: ContextSplit | None

    def rows(self, x_BR: Tensor) -> Tensor:
        """[B, R, ..] to the slots of this rank [B, S, ..]."""
        return x_BR if self.context is None else select_slots(x_BR, self.context, self.groups.rank(self.axis))

    def held(self, x_T: Tensor) -> Tensor:
        """Of the list of all tokens [B*R, ..], those of this rank [B*S, ..]."""
        return self.rows(x_T.view(*self.shape, *x_T.shape[1:])).flatten(0, 1)

    def routed(self, x_T: Tensor) -> Tensor:
        """Of the list of all tokens, those that this rank routes [B*S / tp, ..]."""
        return self.held(x_T).chunk(self.groups.size("tp"))[self.groups.rank("tp")]

    def whole(self, x_T: Tensor) -> Tensor:
        """The list of all tokens [B*R, ..] from those that each rank routes; undoes `routed`. Collective."""
        group = self.groups.group("tp", self.axis)
        if group is None:
            return x_T
        every_WT = all_gather(x_T, group).wait()
        if self.context is None:
            return every_WT
        # Ranks of tp vary fastest, so the parts of a rank of the axis follow each other.
        parts = every_WT.view(self.groups.size(self.axis), self.shape[0], -1, *x_T.shape[1:])
        return join_slots(list(parts), self.context).flatten(0, 1)

    def info(self, here: Batch) -> "MicrobatchInfo":
        """What layers may know of this rank's slots."""
        return MicrobatchInfo(**vars(here.sequence_info(self.context)), part=self)

    def capacity_group(self) -> CapacityGroup:
        """Those that share the rows, as whose tokens compete for the places of an expert."""
        return CapacityGroup(whole=self.whole, own=self.routed, num_tokens=self.shape[0] * self.slots)


@dataclass(frozen=True, kw_only=True, eq=False)
class MicrobatchInfo(SequenceInfo):
    """And with whom this rank shares the tokens.

    Attributes:
        part: of the tokens, which this rank has.
    """

    part: TokenPart
