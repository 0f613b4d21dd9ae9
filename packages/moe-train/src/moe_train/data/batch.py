"""`Batch`: the sequences of one optimizer step, with everything that the model and the loss need to know of them.

Shape legend: B sequences (rows), S token slots per row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from moe_parallel import ContextSplit, SequenceInfo


def document_numbers(token_BS: Tensor, end_of_document: int) -> Tensor:
    """Number of the document of each token inside its row; the token that ends a document belongs to it."""
    ends_BS = (token_BS == end_of_document).long()
    return ends_BS.cumsum(1) - ends_BS


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B rows of tokens in the global order of the step, or a run of rows of them.

    Attributes:
        token_BS: int64 input tokens; any legal id in padding slots.
        target_BS: int64 next tokens; any legal id where the mask is False.
        target_mask_BS: bool, which targets count in the loss.
        valid_BS: bool, which slots hold tokens; padding sits at the end of a row.
        position_BS: int64 position inside the document.
        token_index_BS: int64 index of each slot in the global batch; -1 for rows of padding, and for slots that rows
            were padded with later.
        document_BS: int64 number of the document inside its row, 0, 1, 2, ... from left to right; None where a row is
            one document.
    """

    token_BS: Tensor
    target_BS: Tensor
    target_mask_BS: Tensor
    valid_BS: Tensor
    position_BS: Tensor
    token_index_BS: Tensor
    document_BS: Tensor | None = None

    @classmethod
    def from_rows(
        cls,
        token_BS: Tensor,
        target_BS: Tensor,
        valid_BS: Tensor,
        target_mask_BS: Tensor | None = None,
        *,
        document_BS: Tensor | None = None,
        sequence_B: Tensor | None = None,
    ) -> "Batch":
        """Rows of tokens; by default a row is one document and every valid slot has a target that counts.

        With several documents in a row (`document_BS`) the last token of each has no target: the next token belongs to
        another document. `sequence_B` has the numbers of the rows in the global batch, -1 for padding; by default they
        are counted from 0.
        """
        rows, slots = token_BS.shape
        number_B1 = (torch.arange(rows) if sequence_B is None else sequence_B).unsqueeze(1)
        target_mask_BS = valid_BS if target_mask_BS is None else target_mask_BS & valid_BS
        slot_S = torch.arange(slots)
        position_BS = slot_S.expand(rows, slots)
        if document_BS is not None:
            begins_BS = document_BS != document_BS.roll(1, 1)
            begins_BS[:, 0] = True
            position_BS = position_BS - torch.where(begins_BS, position_BS, 0).cummax(1).values
            ends_BS = begins_BS.roll(-1, 1)
            # What follows the row is unknown here, so its last slot keeps its target.
            ends_BS[:, -1] = False
            target_mask_BS = target_mask_BS & ~ends_BS
            target_BS = target_BS.masked_fill(ends_BS, 0)
        return cls(
            token_BS=token_BS,
            target_BS=target_BS,
            target_mask_BS=target_mask_BS,
            valid_BS=valid_BS,
            position_BS=position_BS,
            token_index_BS=torch.where(number_B1 < 0, -1, number_B1 * slots + slot_S),
            document_BS=document_BS,
        )

    @property
    def num_sequences(self) -> int:
        return self.token_BS.shape[0]

    @property
    def first_sequence(self) -> int:
        """Number of the first row, of those that are no padding, in the global batch; reads the host."""
        return int(self.token_index_BS[0, 0]) // self.token_BS.shape[1]

    def padded(self, slots: int) -> "Batch":
        """Rows of so many slots, padded at their end; the padding belongs to the last document of its row."""
        more = slots - self.token_BS.shape[1]
        if more == 0:
            return self
        padded = self.each(lambda value: torch.nn.functional.pad(value, (0, more)))
        index_BS = torch.nn.functional.pad(self.token_index_BS, (0, more), value=-1)
        if self.document_BS is None:
            return replace(padded, token_index_BS=index_BS)
        last_BS = self.document_BS[:, -1:].expand(-1, more)
        return replace(padded, token_index_BS=index_BS, document_BS=torch.cat((self.document_BS, last_BS), 1))

    def sequence_info(self, context: ContextSplit | None = None) -> SequenceInfo:
        """The part of the batch that layers may see; `context` says whose slots these are."""
        return SequenceInfo(
            position_BS=self.position_BS,
            token_index_BS=self.token_index_BS,
            valid_BS=self.valid_BS,
            document_BS=self.document_BS,
            context=context,
        )

    def ahead(self, depth: int) -> "Ahead":
        """What multi-token prediction of this depth predicts. It needs whole rows: rows are shifted before they are
        split over ranks."""
        return Ahead(
            token_BS=self._shifted(self.target_BS, depth - 1) * self._same_document(depth),
            target_BS=self._shifted(self.target_BS, depth),
            target_mask_BS=self._shifted(self.target_mask_BS, depth) & self._same_document(depth),
        )

    def _shifted(self, x_BS: Tensor, slots: int) -> Tensor:
        """x of the slot so many to the right; zero where the row ends."""
        return x_BS if slots == 0 else torch.nn.functional.pad(x_BS[:, slots:], (0, min(slots, x_BS.shape[1])))

    def _same_document(self, slots: int) -> Tensor:
        """Whether the slot so many to the right holds a token of the same document."""
        valid_BS = self._shifted(self.valid_BS, slots)
        if self.document_BS is None:
            return valid_BS
        return valid_BS & (self._shifted(self.document_BS, slots) == self.document_BS)

    def packed(self, lengths: Sequence[int]) -> "Batch":
        """All rows in one, of each so many slots from its beginning; what was a row is a document of its own.

        Documents inside a row stay apart as well. Nothing at all gives a slot of padding.
        """
        if sum(lengths) == 0:
            padding = self.rows(0, 1).each(lambda value: torch.zeros_like(value[:, :1]))
            return replace(padding, token_index_BS=torch.full_like(padding.token_index_BS, -1), document_BS=None)
        parts = [(row, length) for row, length in enumerate(lengths) if length]

        def join(value_BS: Tensor) -> Tensor:
            return torch.cat([value_BS[row, :length] for row, length in parts]).unsqueeze(0)

        packed = self.each(join)
        if len(parts) == 1:
            return packed
        document_BS = torch.zeros_like(self.token_BS) if self.document_BS is None else self.document_BS
        numbers, first = [], 0
        for row, length in parts:
            numbers.append(document_BS[row, :length] + first)
            first = int(numbers[-1][-1]) + 1
        return replace(packed, document_BS=torch.cat(numbers).unsqueeze(0))

    def rows(self, start: int, stop: int) -> "Batch":
        """The sequences `start <= i < stop`."""
        return self.each(lambda value: value[start:stop])

    def microbatches(self, size: int) -> "list[Batch]":
        """Execution microbatches of `size` sequences in order; the last one may be smaller."""
        return [self.rows(start, start + size) for start in range(0, self.num_sequences, size)]

    def to(self, device: torch.device) -> "Batch":
        return self.each(lambda value: value.to(device, non_blocking=True))

    def each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """The same change of every tensor [B, S]."""
        return replace(self, **{name: change(value) for name, value in vars(self).items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """Inputs and targets of multi-token prediction of depth d, which at the slot of token t sees token t + d and
    predicts token t + d + 1, all of one document.

    Attributes:
        token_BS: int64 tokens t + d; 0 where the document has none.
        target_BS: int64 tokens t + d + 1; any legal id where the mask is False.
        target_mask_BS: bool, which targets count.
    """

    token_BS: Tensor
    target_BS: Tensor
    target_mask_BS: Tensor

    def each(self, change: Callable[[Tensor], Tensor]) -> "Ahead":
        """The same change of every tensor [B, S]."""
        return Ahead(**{name: change(value) for name, value in vars(self).items()})
