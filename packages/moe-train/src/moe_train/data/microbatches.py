"""How the sequences of a step become microbatches: which of them a rank works on, with whom, and when.

Every rank computes it alone from the lengths of all sequences and gets the same as the others. All make the same number
of microbatches, because every microbatch is one forward and backward in which all of them take part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moe_parallel import context_axis
from moe_parallel.context.dynamic import plan_context
from moe_parallel.context.microbatches import ContextPlan, SequenceWork
from moe_train.data.batch import Batch
from moe_train.data.share import Share
from moe_train.data.source import TokenSource


@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """One forward and backward.

    Attributes:
        batch: whole rows.
        axis: of the groups, whose ranks share every row.
    """

    batch: Batch
    axis: str = "cp"


@dataclass(frozen=True, kw_only=True)
class StepTokens:
    """What a rank works on in a step.

    Attributes:
        microbatches: in their order.
        lengths_N: tokens of every sequence of the global batch.
        work_balance: predicted, work of the sequences / (ranks * time of the slowest rank, summed over microbatches).
    """

    microbatches: tuple[Microbatch, ...]
    lengths_N: npt.NDArray[np.int64]
    work_balance: float


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The sequences of a microbatch, before they are read.

    Attributes:
        numbers: in the global batch; -1 gives a row of padding.
        axis: of the groups, whose ranks share every row.
        packed: all of them in one row, each a document of its own.
    """

    numbers: npt.NDArray[np.int64]
    axis: str = "cp"
    packed: bool = False


class StepCut(Protocol):
    """A way to cut steps into microbatches."""

    def rows(self, lengths_N: npt.NDArray[np.int64]) -> tuple[Sequence[Rows], float]:
        """This rank's microbatches for sequences of these lengths, and the predicted balance of work."""


@dataclass(frozen=True, kw_only=True)
class FixedCut:
    """Each microbatch has the same number of sequences, a row each, which the ranks of `cp` share.

    Attributes:
        share: of this data-parallel rank.
        ranks: that share every row.
        size: sequences of a microbatch; the last one may be smaller.
        work: of a sequence.
    """

    share: Share
    ranks: int
    size: int
    work: SequenceWork

    def rows(self, lengths_N: npt.NDArray[np.int64]) -> tuple[Sequence[Rows], float]:
        numbers = self.share.rows(lengths_N.size)
        useful = sum(map(self.work.of, lengths_N.tolist()))
        # Rows are as long as the longest sequence.
        slots = int(lengths_N.max(initial=0))
        on_rank = self.work.on_rank(self.work.of(slots), slots, self.ranks)
        done = self.share.ranks * self.ranks * numbers.size * on_rank
        parts = [Rows(numbers=numbers[start : start + self.size]) for start in range(0, numbers.size, self.size)]
        return parts, useful / done if done else 1.0


@dataclass(frozen=True, kw_only=True)
class DynamicCut:
    """Ranks are grouped anew for each microbatch, many for long sequences and few for short ones (dynamic CP).

    Attributes:
        rank: of `ranks`, those of `cp` and `dp`.
        rank_slots: token slots that a rank has at most.
        slot_multiple: of which the slots of a rank are a multiple.
        least_microbatches: of a step.
        work: of a sequence.
    """

    rank: int
    ranks: int
    rank_slots: int
    slot_multiple: int
    least_microbatches: int
    work: SequenceWork

    def rows(self, lengths_N: npt.NDArray[np.int64]) -> tuple[Sequence[Rows], float]:
        lengths = lengths_N.tolist()
        plan = plan_context(
            lengths,
            ranks=self.ranks,
            rank_slots=self.rank_slots,
            work=self.work,
            slot_multiple=self.slot_multiple,
            least_microbatches=self.least_microbatches,
        )
        return packed_rows(plan, self.rank), plan.balance(lengths, self.work)


def packed_rows(plan: ContextPlan, rank: int) -> Sequence[Rows]:
    """The microbatches of a rank: one row for the sequences of its block, or a row of padding where there are none."""
    blocks = [plan.block(number, rank) for number in range(len(plan.microbatches))]
    return [
        Rows(numbers=np.array(block.sequences or [-1]), axis=context_axis(block.size), packed=True) for block in blocks
    ]


def next_step(source: TokenSource, cut: StepCut, change: Callable[[Batch], Batch] | None = None) -> StepTokens:
    """Read what this rank works on in the next step; `change` is made to the rows before they are packed."""
    lengths_N = source.next_lengths()
    parts, balance = cut.rows(lengths_N)
    batch = source.next_batch(np.concatenate([part.numbers for part in parts]))
    batch = batch if change is None else change(batch)
    microbatches = []
    start = 0
    for part in parts:
        rows = batch.rows(start, start + part.numbers.size)
        start += part.numbers.size
        if part.packed:
            rows = rows.packed(np.where(part.numbers < 0, 0, lengths_N[part.numbers]).tolist())
        microbatches.append(Microbatch(batch=rows, axis=part.axis))
    return StepTokens(microbatches=tuple(microbatches), lengths_N=lengths_N, work_balance=balance)


def whole_rows(batch: Batch, size: int) -> list[Microbatch]:
    """Microbatches of `size` rows of a batch in order; the last one may be smaller."""
    return [Microbatch(batch=rows) for rows in batch.microbatches(size)]
