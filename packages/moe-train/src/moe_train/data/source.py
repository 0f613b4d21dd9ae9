"""`TokenSource`: batches in a fixed global order, with a state that continues it exactly."""

import zlib
from collections.abc import Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from moe_train.data.batch import Batch, document_numbers
from moe_train.errors import MoeTrainError


class TokenSource(Protocol):
    """An endless supply of global batches.

    The order of sequences depends on the data and the seed only. `state` after a batch, given to `load_state` of a
    fresh source over the same data, makes it continue with the next batch; nothing that was read ahead is lost.
    """

    def next_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each sequence of the next global batch, which may have fewer of them than usual where an epoch
        ends. The position stays."""

    def next_batch(self, rows: npt.NDArray[np.int64] | None = None) -> Batch:
        """These sequences of the next global batch, by their numbers in it; -1 gives padding, None gives all.

        The position moves on by the whole batch, so that the sources of all ranks stay at the same place. Rows have
        the same number of slots on all ranks.
        """

    def state(self) -> dict[str, int]:
        """The position in the order, as JSON values."""

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue from a state.

        Raises:
            MoeTrainError: the state belongs to other data or another batch size.
        """


class SequenceSource:
    """The sequences of one long text, in another order every epoch.

    The targets of a sequence are the tokens of the text shifted by one, and it is padded at its end. Every token but
    the first is a target exactly once per epoch, unless it follows the end of a document.

    Args:
        tokens: int32, at least two.
        cut_N: int64, where sequences begin, ascending, and behind it where the last one ends (`moe_train.data.cuts`).
        row_slots: slots of a row; None takes those of the longest sequence of a batch.
        batch_sequences: sequences of a batch; the last batch of an epoch holds what is left.
        seed: of the order. None keeps the order of the text, in every epoch.
        end_of_document: a token that has no target because it ends a document; None if there is no such token.
        separate_documents: keep the documents (or pieces of them) that share a sequence apart: none sees another, and
            positions begin at 0 in each.
    """

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        cut_N: npt.NDArray[np.int64],
        *,
        row_slots: int | None = None,
        batch_sequences: int,
        seed: int | None,
        end_of_document: int | None = None,
        separate_documents: bool = False,
    ) -> None:
        if tokens.size < 2:
            raise MoeTrainError(f"a token source needs at least 2 tokens, got {tokens.size}")
        self._tokens = tokens
        self._start_N = cut_N[:-1]
        self._length_N = np.diff(cut_N)
        self._row_slots = row_slots
        self._batch_sequences = batch_sequences
        self._seed = seed
        self._end_of_document = end_of_document
        self._separate_documents = separate_documents
        self._epoch = 0
        self._position = 0
        self._order = self._epoch_order()

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch."""
        return self._start_N.size

    def next_lengths(self, *, at_most: int | None = None) -> npt.NDArray[np.int64]:
        """As the seam says; of a global batch of no more than `at_most` sequences, if that is given."""
        return self._length_N[self._next(at_most)]

    def next_batch(self, rows: npt.NDArray[np.int64] | None = None, *, at_most: int | None = None) -> Batch:
        """As the seam says; of a global batch of no more than `at_most` sequences, if that is given."""
        numbers = self._next(at_most)
        rows = np.arange(numbers.size) if rows is None else rows
        batch = self._rows(numbers, rows)
        self._position += numbers.size
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
            "num_sequences": self.num_sequences,
            "lengths_crc32": zlib.crc32(self._length_N.astype("<i8").tobytes()),
            "batch_sequences": self._batch_sequences,
            "seed": -1 if self._seed is None else self._seed,
        }

    def _epoch_order(self) -> npt.NDArray[np.int64]:
        index = np.arange(self.num_sequences, dtype=np.int64)
        if self._seed is None:
            return index
        return np.argsort(_mix(index.astype(np.uint64), self._seed, self._epoch), kind="stable")

    def _next(self, at_most: int | None) -> npt.NDArray[np.int64]:
        """The sequences of the next global batch; begins the next epoch if there are no more."""
        if self._position == self.num_sequences:
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._epoch_order()
        limit = self._batch_sequences if at_most is None else min(at_most, self._batch_sequences)
        return self._order[self._position : self._position + limit]

    def _rows(self, numbers: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> Batch:
        slots = int(self._length_N[numbers].max()) if self._row_slots is None else self._row_slots
        length_B = np.where(rows < 0, 0, self._length_N[numbers[rows]])
        slot_S = np.arange(slots)
        last = self._tokens.size - 1
        slot_BS = np.where(rows < 0, last, self._start_N[numbers[rows]])[:, None] + slot_S
        valid_BS = slot_S < length_B[:, None]
        token_BS = torch.from_numpy(np.where(valid_BS, self._tokens[np.minimum(slot_BS, last)], 0).astype(np.int64))
        target_BS = torch.from_numpy(
            np.where(valid_BS, self._tokens[np.minimum(slot_BS + 1, last)], 0).astype(np.int64)
        )
        document_BS = mask_BS = None
        if self._end_of_document is not None:
            mask_BS = token_BS != self._end_of_document
            target_BS = target_BS * mask_BS
            if self._separate_documents:
                document_BS = document_numbers(token_BS, self._end_of_document)
        return Batch.from_rows(
            token_BS,
            target_BS,
            torch.from_numpy(valid_BS),
            mask_BS,
            document_BS=document_BS,
            sequence_B=torch.from_numpy(rows),
        )


def _mix(index: npt.NDArray[np.uint64], seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """SplitMix64 of (seed, epoch, index): an order that no library version can change."""
    x = index + np.uint64((seed * 0x9E3779B97F4A7C15 + epoch * 0xD1B54A32D192ED03) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return x ^ (x >> np.uint64(31))
