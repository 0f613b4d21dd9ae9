"""`Placement`: which pipeline rank holds which stages of a model, and as which of its chunks."""

from dataclasses import dataclass
from typing import Literal

PlacementKind = Literal["loop", "v"]


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Stages over the ranks of a pipeline; each rank holds `vpp` of them, its chunks, in the order of the model.

    Attributes:
        kind: `loop` begins every chunk at the first rank: stage i is on rank i % pp. `v` turns round at the end, so
            that the stage behind the last rank's is on the last rank again, and with two chunks the first rank holds
            both ends of the model.
        pp: number of ranks.
        vpp: chunks of a rank.
    """

    kind: PlacementKind = "loop"
    pp: int
    vpp: int = 1

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp

    def chunk_of(self, stage: int) -> int:
        return stage // self.pp

    def rank_of(self, stage: int) -> int:
        return self._turned(stage // self.pp, stage % self.pp)

    def stage_of(self, rank: int, chunk: int) -> int:
        return chunk * self.pp + self._turned(chunk, rank)

    def _turned(self, chunk: int, place: int) -> int:
        return self.pp - 1 - place if self.kind == "v" and chunk % 2 else place
