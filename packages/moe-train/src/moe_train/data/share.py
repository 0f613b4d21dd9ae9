"""`Share`: which sequences of a global batch one data-parallel rank works on."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


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

    def rows(self, num_sequences: int) -> npt.NDArray[np.int64]:
        """Numbers of the sequences of a batch, ascending, then -1 for each of padding."""
        if self.ranks == 1:
            return np.arange(num_sequences)
        units = -(-num_sequences // self.unit)
        size = -(-units // self.ranks) * self.unit
        number_N = np.arange(self.rank * size, (self.rank + 1) * size)
        return np.where(number_N < num_sequences, number_N, -1)
