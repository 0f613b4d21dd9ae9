"""How far a training has come, and how that is saved and restored exactly."""

from dataclasses import dataclass

import torch

from moe_train.assemble import Training
from moe_train.checkpoint.load import latest_checkpoint, load_tensors, read_index
from moe_train.checkpoint.save import save_checkpoint
from moe_train.errors import MoeTrainError
from moe_train.run_directory import RunDirectory
from moe_train.scale import LoadWindow


@dataclass
class Progress:
    """The part of the state of a run that is neither weights nor optimizer nor data position.

    Attributes:
        step: finished steps.
        updates: steps that were not skipped; drives the learning-rate schedule.
        skipped_in_a_row: steps skipped since the last update.
        tokens: valid tokens of all finished steps.
        window: expert load of the last update, for the global balance loss.
    """

    step: int
    updates: int
    skipped_in_a_row: int
    tokens: int
    window: LoadWindow

    @classmethod
    def start(cls, training: Training) -> "Progress":
        """Before the first step: a balanced load stands in for the previous step's."""
        model = training.config.model
        counts = torch.full(
            (model.num_layers, model.num_experts), model.router.top_k, dtype=torch.int64, device=training.device
        )
        window = LoadWindow(counts_LE=counts, num_tokens=model.num_experts)
        return cls(step=0, updates=0, skipped_in_a_row=0, tokens=0, window=window)


def save(training: Training, run: RunDirectory, progress: Progress) -> None:
    """Write a complete checkpoint of the run; what it holds is fixed before this returns."""
    state = {
        "step": progress.step,
        "updates": progress.updates,
        "skipped_in_a_row": progress.skipped_in_a_row,
        "tokens": progress.tokens,
        "window": {"counts_LE": progress.window.counts_LE.tolist(), "num_tokens": progress.window.num_tokens},
        "engine": training.engine.state_values(),
        "data": training.data.train.state(),
    }
    keep = training.config.checkpoint.keep
    save_checkpoint(run.checkpoints, progress.step, training.engine.state_tensors(), state, keep=keep)


def restore(training: Training, run: RunDirectory) -> Progress:
    """Continue from the newest complete checkpoint of the run; from the start if there is none.

    Raises:
        MoeTrainError: the checkpoint is damaged or belongs to another model; nothing was changed.
    """
    path = latest_checkpoint(run.checkpoints)
    if path is None:
        return Progress.start(training)
    state = read_index(path).state
    try:
        window = LoadWindow(
            counts_LE=torch.tensor(state["window"]["counts_LE"], device=training.device),
            num_tokens=state["window"]["num_tokens"],
        )
        progress = Progress(
            step=state["step"],
            updates=state["updates"],
            skipped_in_a_row=state["skipped_in_a_row"],
            tokens=state["tokens"],
            window=window,
        )
        engine, data = state["engine"], state["data"]
    except (KeyError, TypeError) as error:
        raise MoeTrainError(f"the state in {path / 'index.json'} is incomplete: {error!r}") from error
    # Weights last: whatever can be refused is refused before one is touched.
    training.data.train.load_state(data)
    load_tensors(path, training.engine.state_tensors())
    training.engine.load_finished(engine)
    return progress
