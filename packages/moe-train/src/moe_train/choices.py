"""Router choices of a run on disk: recorded step by step, and forced in another run of the same data.

A recording is kept by sequence of the global order of a step, so that it fits any layout of ranks and any cut into
microbatches. Each rank writes one safetensors file per step.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_kernels.replay import RouterReplay
from moe_train.data.batch import Batch
from moe_train.data.tokens import TokenPart
from moe_train.errors import MoeTrainError


@dataclass(frozen=True, kw_only=True)
class StepChoices:
    """The choices of one step.

    Attributes:
        step: number of the step.
        mode: `record` keeps what routers choose, `force` repeats what was kept.
        table: what is kept.
    """

    step: int
    mode: Literal["record", "force"]
    table: RouterReplay

    def of(self, batch: Batch) -> "MicrobatchChoices":
        """The part that concerns an execution microbatch, whose rows are not padded yet; reads its mask on the host."""
        occupied = batch.valid_BS.any(1).nonzero()
        rows = 0 if occupied.numel() == 0 else int(occupied[-1]) + 1
        first = batch.first_sequence if rows else 0
        return MicrobatchChoices(
            step=self, sequences=range(first, first + rows), slots=batch.token_BS.shape[1], rows=batch.num_sequences
        )


@dataclass(frozen=True, kw_only=True)
class MicrobatchChoices:
    """What the routers of one forward repeat or leave behind.

    Attributes:
        step: of which it is a part.
        sequences: numbers in the global order; sequences of padding after them are not kept.
        slots: tokens of a sequence.
        rows: sequences here, padding included.
        part: of their tokens, which this rank routes; None is all.
    """

    step: StepChoices
    sequences: range
    slots: int
    rows: int
    part: TokenPart | None = None

    def recall(self, layer: str, top_k: int, device: torch.device) -> Tensor | None:
        """Ids [T, K] to force; None where the router is free."""
        if self.step.mode == "record":
            return None
        ids_TK = torch.full((self.rows * self.slots, top_k), -1, dtype=torch.int64, device=device)
        size = len(self.sequences) * self.slots
        if size:
            found = self.step.table.choices(self.step.step, self.sequences, layer, device=device, shape=(size, top_k))
            ids_TK[:size] = found
        if self.part is None:
            return ids_TK
        more = self.part.shape[1] - self.slots
        ids_BRK = F.pad(ids_TK.view(self.rows, self.slots, top_k), (0, 0, 0, more), value=-1)
        return self.part.routed(ids_BRK.flatten(0, 1))

    def remember(self, layer: str, ids_TK: Tensor) -> None:
        """Keep what was chosen, where it is to be kept: on the first of the ranks that share the sequences, which all
        come here."""
        if self.step.mode != "record":
            return
        if self.part is not None:
            ids_TK = self.part.whole(ids_TK)
            ids_TK = ids_TK.view(*self.part.shape, -1)[:, : self.slots].flatten(0, 1)
            if self.part.groups.rank("tp", self.part.axis) > 0:
                return
        size = len(self.sequences) * self.slots
        if size:
            self.step.table.record(self.step.step, self.sequences, layer, ids_TK[:size])


def save_choices(folder: Path, choices: StepChoices, *, rank: int, data: Mapping[str, int]) -> None:
    """Write what this rank has recorded in a step; `data` says which batch it was.

    Raises:
        MoeTrainError: the file cannot be written.
    """
    path = folder / f"step-{choices.step:08d}-rank-{rank:05d}.safetensors"
    try:
        folder.mkdir(exist_ok=True)
        save_file(choices.table.tensors(), path, {"data": json.dumps(dict(data))})
    except (OSError, SafetensorError) as error:
        raise MoeTrainError(f"the router's choices cannot be written to {path}: {error}") from error


def load_choices(folder: Path, step: int, *, data: Mapping[str, int]) -> StepChoices:
    """Read what all ranks have recorded in a step, to be forced.

    Raises:
        MoeTrainError: nothing was recorded for the step, or for another batch than `data` says.
    """
    table = RouterReplay()
    files = sorted(folder.glob(f"step-{step:08d}-rank-*.safetensors"))
    if not files:
        raise MoeTrainError(f"no router choices of step {step} are recorded in {folder}")
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                recorded = json.loads((file.metadata() or {}).get("data", "{}"))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError, ValueError) as error:
            raise MoeTrainError(f"the router choices in {path} cannot be read: {error}") from error
        if recorded != dict(data):
            raise MoeTrainError(
                f"the router choices in {path} are those of another batch: {recorded}, here it is {dict(data)}"
            )
        table.merge(RouterReplay.from_tensors(tensors))
    return StepChoices(step=step, mode="force", table=table)
