"""`Batch`: the sequences of one optimizer step, with everything that the model and the loss need to know of them.

Shape legend: B sequences (rows), S token slots per row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parallel import SequenceInfo


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B rows of tokens in the global order of the step, or a run of rows of them.

    Attributes:
        token_BS: int64 input tokens; any legal id in padding slots.
        target_BS: int64 next tokens; any legal id where the mask is False.
        target_mask_BS: bool, which targets count in the loss.
        valid_BS: bool, which slots hold tokens; padding sits at the end of a row.
        position_BS: int64 position inside the document.
        token_index_BS: int64 index of each slot in the global batch.
    """

    token_BS: Tensor
    target_BS: Tensor
    target_mask_BS: Tensor
    valid_BS: Tensor
    position_BS: Tensor
    token_index_BS: Tensor

    @classmethod
    def from_rows(
        cls,
        token_BS: Tensor,
        target_BS: Tensor,
        valid_BS: Tensor,
        target_mask_BS: Tensor | None = None,
        *,
        first_sequence: int = 0,
    ) -> "Batch":
        """Rows that are one document each; by default every valid slot has a target that counts.

        `first_sequence` is the number of the first row in the global batch.
        """
        rows, slots = token_BS.shape
        index = torch.arange(rows * slots).view(rows, slots)
        return cls(
            token_BS=token_BS,
            target_BS=target_BS,
            target_mask_BS=valid_BS if target_mask_BS is None else target_mask_BS & valid_BS,
            valid_BS=valid_BS,
            position_BS=index % slots,
            token_index_BS=index + first_sequence * slots,
        )

    @property
    def num_sequences(self) -> int:
        return self.token_BS.shape[0]

    @property
    def first_sequence(self) -> int:
        """Number of the first row in the global batch; reads the host."""
        return int(self.token_index_BS[0, 0]) // self.token_BS.shape[1]

    def sequence_info(self) -> SequenceInfo:
        """The part of the batch that layers may see."""
        return SequenceInfo(position_BS=self.position_BS, token_index_BS=self.token_index_BS, valid_BS=self.valid_BS)

    def rows(self, start: int, stop: int) -> "Batch":
        """The sequences `start <= i < stop`."""
        return Batch(**{name: value[start:stop] for name, value in vars(self).items()})

    def microbatches(self, size: int) -> "list[Batch]":
        """Execution microbatches of `size` sequences in order; the last one may be smaller."""
        return [self.rows(start, start + size) for start in range(0, self.num_sequences, size)]

    def to(self, device: torch.device) -> "Batch":
        return Batch(**{name: value.to(device, non_blocking=True) for name, value in vars(self).items()})
