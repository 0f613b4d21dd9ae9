"""What ranks do in each microbatch where context parallelism is cut anew for every one, and how long that takes.

Imports nothing heavy.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from moe_parallel.errors import MoeParallelError


@dataclass(frozen=True, kw_only=True)
class SequenceWork:
    """The work of sequences, in any one unit: of S tokens `linear * S + quadratic * S * S`, and sharing costs more.

    Attributes:
        linear: of a token, in all but attention.
        quadratic: of attention, by the square of the tokens; half of every query with every key where it is causal.
        shared: of every rank of a block, for each token of the block that other ranks hold: the exchange of its keys
            and values, as far as it is not hidden, in work that could have been done meanwhile. Where that is 0 no plan
            is better than all sequences over all ranks, one after the other.
    """

    linear: float
    quadratic: float
    shared: float

    def __post_init__(self) -> None:
        values = (self.linear, self.quadratic, self.shared)
        if not all(isfinite(value) and value >= 0 for value in values) or not self.linear:
            raise MoeParallelError(
                f"the work of a sequence is finite and not negative, and every token has some: linear = {self.linear}, "
                f"quadratic = {self.quadratic}, shared = {self.shared}"
            )

    def of(self, tokens: int) -> float:
        """Work of a sequence that one rank has alone."""
        return self.linear * tokens + self.quadratic * tokens * tokens

    def on_rank(self, work: float, tokens: int, size: int) -> float:
        """Work of each of the `size` ranks of a block, whose sequences have this work (`of`) and these tokens."""
        return (work + self.shared * tokens * (size - 1)) / size


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive ranks that share some sequences in a microbatch.

    Attributes:
        first: the first rank, a multiple of `size`.
        size: how many ranks; a power of two.
        sequences: numbers of the sequences, ascending; may be empty.
    """

    first: int
    size: int
    sequences: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.size < 1 or self.size & (self.size - 1) or self.first < 0 or self.first % self.size:
            raise MoeParallelError(
                f"a block has a power of two of ranks and begins at a multiple of it, not {self.size} ranks from rank "
                f"{self.first}"
            )

    def slots(self, lengths: Sequence[int], slot_multiple: int = 1) -> int:
        """Token slots of each rank: those of all sequences, filled up to a multiple of 2 * size * slot_multiple."""
        step = 2 * self.size * slot_multiple
        return -(-self._tokens(lengths) // step) * 2 * slot_multiple

    def time(self, lengths: Sequence[int], work: SequenceWork) -> float:
        """Work of each rank."""
        return work.on_rank(sum(work.of(lengths[it]) for it in self.sequences), self._tokens(lengths), self.size)

    def _tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths[it] for it in self.sequences)


@dataclass(frozen=True, kw_only=True)
class ContextPlan:
    """Which ranks share which sequences, microbatch by microbatch.

    Attributes:
        ranks: how many ranks take part in every microbatch.
        microbatches: the blocks of each; they cover all ranks once, ascending. Every sequence is in one block.

    Raises:
        MoeParallelError: blocks leave out a rank or have one twice, or a sequence number is missing or there twice.
    """

    ranks: int
    microbatches: tuple[tuple[Block, ...], ...]

    def __post_init__(self) -> None:
        for number, blocks in enumerate(self.microbatches):
            after = 0
            for block in blocks:
                if block.first != after:
                    raise MoeParallelError(f"in microbatch {number} a block begins at {block.first} instead of {after}")
                after += block.size
            if after != self.ranks:
                raise MoeParallelError(f"the blocks of microbatch {number} have {after} of {self.ranks} ranks")
        numbers = sorted(it for blocks in self.microbatches for block in blocks for it in block.sequences)
        for expected, found in enumerate(numbers):
            if expected != found:
                raise MoeParallelError(
                    f"a plan has all sequences from 0 on once each, but {min(expected, found)} is "
                    + ("missing" if expected < found else "in two blocks")
                )

    def block(self, microbatch: int, rank: int) -> Block:
        """The block that a rank belongs to."""
        if not 0 <= microbatch < len(self.microbatches) or not 0 <= rank < self.ranks:
            raise MoeParallelError(
                f"there is no rank {rank} of microbatch {microbatch}: the plan has {len(self.microbatches)} "
                f"microbatches of {self.ranks} ranks"
            )
        blocks = self.microbatches[microbatch]
        return blocks[bisect_right(blocks, rank, key=lambda block: block.first) - 1]

    def time(self, lengths: Sequence[int], work: SequenceWork) -> float:
        """The sum over microbatches of the largest work of a rank."""
        return sum(max(block.time(lengths, work) for block in blocks) for blocks in self.microbatches)

    def balance(self, lengths: Sequence[int], work: SequenceWork) -> float:
        """All work without that of sharing, by ranks * time: 1 is perfect, and so is a plan without any work."""
        time = self.time(lengths, work)
        return sum(map(work.of, lengths)) / (self.ranks * time) if time else 1.0

    def slots(self, lengths: Sequence[int], slot_multiple: int = 1) -> int:
        """The most token slots of a rank in any microbatch."""
        return max((block.slots(lengths, slot_multiple) for block in self.blocks()), default=0)

    def blocks(self) -> Iterable[Block]:
        """Of all microbatches, one after the other."""
        return (block for blocks in self.microbatches for block in blocks)


def group_sizes(ranks: int) -> tuple[int, ...]:
    """The sizes that blocks may have: powers of two that divide the number of ranks, ascending.

    Raises:
        MoeParallelError: there is no rank.
    """
    if ranks < 1:
        raise MoeParallelError(f"sequences are shared by at least one rank, not {ranks}")
    return tuple(1 << power for power in range((ranks & -ranks).bit_length()))
