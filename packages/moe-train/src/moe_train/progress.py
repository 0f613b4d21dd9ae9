"""How far a training has come, and how that is saved and restored exactly."""

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from moe_parallel import gather_json, together
from moe_train.assemble import Training
from moe_train.checkpoint.load import latest_checkpoint, load_tensors, read_index
from moe_train.checkpoint.save import save_checkpoint
from moe_train.errors import MoeTrainError
from moe_train.models.bias import bias_tensors
from moe_train.run_directory import RunDirectory
from moe_train.scale import LoadWindow

logger = logging.getLogger(__name__)


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
        shape = (len(training.router_names), model.num_experts)
        counts = torch.full(shape, model.router.top_k, dtype=torch.int64, device=training.device)
        window = LoadWindow(counts_LE=counts, num_tokens=model.num_experts)
        return cls(step=0, updates=0, skipped_in_a_row=0, tokens=0, window=window)


def save(training: Training, run: RunDirectory, progress: Progress) -> None:
    """Write a complete checkpoint of the run; what it holds is fixed before this returns. Collective."""
    state = {
        "step": progress.step,
        "updates": progress.updates,
        "skipped_in_a_row": progress.skipped_in_a_row,
        "tokens": progress.tokens,
        "window": {"counts_LE": progress.window.counts_LE.tolist(), "num_tokens": progress.window.num_tokens},
        "engine": training.engine.state_values(),
        "data": training.data.train.state(),
        "written_on": _layout(training),
    }
    keep = training.config.checkpoint.keep
    rank = training.groups.rank("world")
    tensors = [*training.engine.state_tensors(), *bias_tensors(training.model, training.groups)]
    save_checkpoint(run.checkpoints, progress.step, tensors, state, keep=keep, rank=rank)


def restore(training: Training, run: RunDirectory) -> Progress:
    """Continue from the newest complete checkpoint of the run; from the start if there is none. Collective.

    The checkpoint may be of another layout of ranks or another data-parallel engine.

    Raises:
        MoeTrainError: the checkpoint is damaged or belongs to another model; nothing was changed.
    """
    path = latest_checkpoint(run.checkpoints)
    seen = gather_json(None if path is None else path.name)
    if len(set(seen)) > 1:
        raise MoeTrainError(f"ranks see different checkpoints in {run.checkpoints}: {seen}; it must be shared by all")
    if path is None:
        return Progress.start(training)
    with together():
        progress, engine = _read(training, path)
    load_tensors(path, [*training.engine.state_tensors(), *bias_tensors(training.model, training.groups)])
    training.engine.load_finished(engine)
    return progress


def _read(training: Training, path: Path) -> tuple[Progress, dict[str, int | float]]:
    """Progress and engine values of a checkpoint; the position in the data is taken over."""
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
    before = state.get("written_on", {})
    changes = [
        f"{name} {before[name]} -> {now}" for name, now in _layout(training).items() if before.get(name, now) != now
    ]
    if changes:
        logger.info("%s was written on another layout and is regrouped: %s", path.name, ", ".join(changes))
    return progress, engine


def _layout(training: Training) -> dict[str, int | str]:
    """How state was spread, for people; nothing is decided by it."""
    axes = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
    sizes = {axis: training.groups.size(axis) for axis in ("world", *axes)}
    return {**sizes, "data_parallel": training.config.memory.data_parallel}
