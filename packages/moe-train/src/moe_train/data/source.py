"""`TokenSource`: batches in a fixed global order, with a state that continues it exactly."""

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moe_train.data.batch import Batch, document_numbers
from moe_train.data.share import WHOLE, Share
from moe_train.errors import MoeTrainError


class TokenSource(Protocol):
    """An endless supply of global batches.

    The order of sequences depends on the data and the seed only. `state` after a batch, given to `load_state` of a
    fresh source over the same data, makes it continue with the next batch; nothing that was read ahead is lost.
    """

    def next_batch(self, share: Share = WHOLE) -> Batch:
        """A rank's share of the next global batch, which may have fewer sequences than usual where an epoch ends.

        The position moves on by the whole batch, so that the sources of all ranks stay at the same place.
        """

    def state(self) -> dict[str, int]:
        """The position in the order, as JSON values."""

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue from a state.

        Raises:
            MoeTrainError: the state belongs to other data or another batch size.
        """


class WindowSource:
    """Non-overlapping windows of one long token sequence, in another order every epoch.

    A window has S input slots; its targets are the same tokens shifted by one. The last window may be shorter and is
    padded. Every token but the first is a target exactly once per epoch, unless documents are kept apart.

    Args:
        tokens: int32, at least two.
        sequence_length: S.
        batch_sequences: sequences of a batch; the last batch of an epoch holds what is left.
        seed: of the order. None keeps the order of the text, in every epoch.
        end_of_document: the token that ends a document, to keep the documents (or pieces of them) that share a window
            apart: none sees another, positions begin at 0 in each, and its last token has no target. None lets a window
            be one document, whatever is in it.
    """

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        *,
        sequence_length: int,
        batch_sequences: int,
        seed: int | None,
        end_of_document: int | None = None,
    ) -> None:
        if tokens.size < 2:
            raise MoeTrainError(f"a token source needs at least 2 tokens, got {tokens.size}")
        self._tokens = tokens
        self._sequence_length = sequence_length
        self._batch_sequences = batch_sequences
        self._seed = seed
        self._end_of_document = end_of_document
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()

    @property
    def num_sequences(self) -> int:
        """Windows in one epoch."""
        return -(-(self._tokens.size - 1) // self._sequence_length)

    def next_batch(self, share: Share = WHOLE, *, at_most: int | None = None) -> Batch:
        """As the seam says; a global batch of no more than `at_most` sequences, if that is given."""
        if self._position == self.num_sequences:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order()
        limit = self._batch_sequences if at_most is None else min(at_most, self._batch_sequences)
        stop = min(self._position + limit, self.num_sequences)
        batch = self._windows(self._order[self._position : stop], share)
        self._position = stop
        return batch

    def rewind(self) -> None:
        """Start again with the first batch of the first epoch."""
        self._epoch, self._position = 0, 0
        self._order = self._epoch_order()

    def state(self) -> dict[str, int]:
        return {"epoch": self._epoch, "position": self._position, **self._identity()}

    def load_state(self, state: Mapping[str, int]) -> None:
        expected = self._identity()
        found = {key: state.get(key) for key in expected}
        if found != expected:
            raise MoeTrainError(f"the saved data position belongs to other data: it has {found}, here is {expected}")
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = self._epoch_order()

    def _identity(self) -> dict[str, int]:
        return {
            "num_tokens": int(self._tokens.size),
            "sequence_length": self._sequence_length,
            "batch_sequences": self._batch_sequences,
            "seed": -1 if self._seed is None else self._seed,
        }

    def _epoch_order(self) -> npt.NDArray[np.int64]:
        index = np.arange(self.num_sequences, dtype=np.int64)
        if self._seed is None:
            return index
        return np.argsort(_mix(index.astype(np.uint64), self._seed, self._epoch), kind="stable")

    def _windows(self, numbers: npt.NDArray[np.int64], share: Share) -> Batch:
        length = self._sequence_length
        start, stop, padding = share.rows(numbers.size)
        # No window has the number after the last, so all of its slots are padding.
        numbers = np.append(numbers[start:stop], np.full(padding, self.num_sequences))
        slot_BS = numbers[:, None] * length + np.arange(length)
        last = self._tokens.size - 1
        valid_BS = slot_BS < last
        token_BS = torch.from_numpy(self._tokens[np.minimum(slot_BS, last)].astype(np.int64))
        target_BS = torch.from_numpy(self._tokens[np.minimum(slot_BS + 1, last)].astype(np.int64))
        document_BS = mask_BS = None
        if self._end_of_document is not None:
            mask_BS = token_BS != self._end_of_document
            document_BS = document_numbers(token_BS, self._end_of_document)
            target_BS = target_BS * mask_BS
        return Batch.from_rows(
            token_BS,
            target_BS,
            torch.from_numpy(valid_BS),
            mask_BS,
            document_BS=document_BS,
            first_sequence=start,
        )


def _mix(index: npt.NDArray[np.uint64], seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """SplitMix64 of (seed, epoch, index): an order that no library version can change."""
    x = index + np.uint64((seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))
