"""`Share`: which sequences of a global batch one data-parallel rank works on."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Share:
    """Consecutive sequences for every rank, equally many for all, in whole balance microbatches.

    Ranks make the same number of forwards of the same shape whatever a batch holds, because each of them takes part in
    every collective. Where the sequences do not go round, the last ranks get padding: sequences without a valid token,
    which count in nothing.

    Attributes:
        rank: place of the rank among those that share the batch.
        ranks: how many share it.
        unit: sequences of a balance microbatch; they stay together.
    """

    rank: int = 0
    ranks: int = 1
    unit: int = 1

    def rows(self, num_sequences: int) -> tuple[int, int, int]:
        """(start, stop, padding): the sequences `start <= i < stop` of the batch, then so many of padding."""
        if self.ranks == 1:
            return 0, num_sequences, 0
        units = -(-num_sequences // self.unit)
        size = -(-units // self.ranks) * self.unit
        start = min(self.rank * size, num_sequences)
        stop = min(start + size, num_sequences)
        return start, stop, size - (stop - start)


WHOLE = Share()
