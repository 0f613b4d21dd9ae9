"""The training loop: batches in, steps, records, validation, checkpoints, and a report at the end."""

import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from moe_kernels.replay import RouterReplay
from moe_memory.measure import Peak
from moe_parallel import AxisGroups, Groups, Topology, together
from moe_train.assemble import Training, assemble, choose_device
from moe_train.choices import StepChoices, load_choices, save_choices
from moe_train.config.tree import TrainConfig
from moe_train.data.corpus import CORPORA
from moe_train.data.microbatches import StepTokens, next_step
from moe_train.errors import MoeTrainError
from moe_train.evaluate import validation_loss
from moe_train.generate import generate_text
from moe_train.memory.report import explained
from moe_train.memory.watch import MemoryWatch, too_small
from moe_train.observe.console import Console
from moe_train.observe.record import LoadRecord, StepRecord, ValidRecord
from moe_train.observe.report import write_report
from moe_train.observe.sink import MetricSink, open_sinks
from moe_train.progress import Progress, restore, save
from moe_train.run_directory import RunDirectory
from moe_train.scale import LoadWindow
from moe_train.step import StepResult, run_step

logger = logging.getLogger(__name__)

LARGEST_SKIP_RUN = 10
SAMPLE_TEMPERATURE = 0.8


def train(
    config: TrainConfig,
    run: RunDirectory,
    *,
    resume: bool,
    groups: Groups | None = None,
    topology: Topology | None = None,
) -> None:
    """Train as configured and leave metrics, checkpoints, a summary and a report in the run directory.

    Collective: every rank trains, the first one writes what is not a checkpoint.

    With `resume` it continues from the newest complete checkpoint there, or from the start where there is none; the
    metrics of later steps are dropped, so that an interrupted run ends with the same files as an uninterrupted one.

    Raises:
        MoeTrainError: the checkpoint does not fit, or too many steps in a row had a non-finite loss or gradient norm.
        OutOfMemoryError: with what filled the memory and what to change; also in a file of the run directory.
    """
    groups = AxisGroups() if groups is None else groups
    memory = MemoryWatch(choose_device(config.train.device))
    with explained(memory, config, groups, run.out_of_memory(groups.rank("world"))):
        _train(config, run, memory, groups, topology, resume=resume)


def _train(
    config: TrainConfig,
    run: RunDirectory,
    memory: MemoryWatch,
    groups: Groups,
    topology: Topology | None,
    *,
    resume: bool,
) -> None:
    training = assemble(config, groups, topology=topology, memory=memory)
    progress = restore(training, run) if resume else Progress.start(training)
    first = training.groups.rank("world") == 0
    sinks: list[MetricSink] = []
    console: Console | None = None
    with together():
        if first:
            sinks = open_sinks(config.observe.sinks, run, progress.step)
            console = Console(config, training.costs, start_step=progress.step)
    try:
        _steps(training, run, progress, sinks, console)
        summary = _summary(training, progress)
        if first:
            run.summary.write_text(json.dumps(summary, indent=2) + "\n")
    finally:
        if console is not None:
            console.close()
        for sink in sinks:
            sink.close()
    if first:
        logger.info("report: %s", write_report(run))


def _steps(
    training: Training, run: RunDirectory, progress: Progress, sinks: list[MetricSink], console: Console | None
) -> None:
    config = training.config
    memory = training.memory
    _report_memory(training, progress.step, sinks, None)
    began, first_step = time.perf_counter(), progress.step
    while progress.step < config.train.steps:
        started = time.perf_counter()
        tokens = next_step(training.data.train, training.cut)
        choices = _choices(training, progress.step + 1)
        with memory.step(), _noted(f"in step {progress.step + 1}"):
            result = run_step(
                training,
                tokens.microbatches,
                updates=progress.updates,
                window=_window(training, progress),
                choices=choices,
            )
        if config.observe.record_choices and choices is not None:
            rank = training.groups.rank("world")
            save_choices(run.choices, choices, rank=rank, data=training.data.train.state())
        _advance(training, progress, result)
        now = time.perf_counter()
        eta = (now - began) / (progress.step - first_step) * (config.train.steps - progress.step)
        record = _record(training, progress, tokens, result, now - started, memory.step_bytes, eta)
        load = LoadRecord(step=progress.step, counts=result.statistics.counts.tolist())
        for sink in sinks:
            sink.write(record)
            sink.write(load)
        if console is not None:
            console.step(record)
        if memory.is_measured:
            _report_memory(training, progress.step, sinks, console if memory.is_last else None)
        if progress.skipped_in_a_row > LARGEST_SKIP_RUN:
            raise MoeTrainError(
                f"{progress.skipped_in_a_row} steps in a row had a non-finite loss or gradient norm, up to step "
                f"{progress.step}; the last good weights are in {run.checkpoints}"
            )
        if _due(progress.step, config.train.valid_interval_steps) or progress.step == config.train.steps:
            with memory.beside("validation"), _noted(f"in the validation after step {progress.step}"):
                valid = _validate(training, progress.step)
            for sink in sinks:
                sink.write(valid)
            if console is not None:
                console.valid(valid)
        if _due(progress.step, config.checkpoint.interval_steps) or progress.step == config.train.steps:
            with memory.beside("checkpoint"), _noted(f"while step {progress.step} was saved"):
                save(training, run, progress)


def _report_memory(training: Training, step: int, sinks: Sequence[MetricSink], console: Console | None) -> None:
    record = training.memory.record(step, training.groups.rank("world"))
    for sink in sinks:
        sink.write(record)
    if console is not None:
        console.memory(record)
        _warn_of_offload(training)


def _warn_of_offload(training: Training) -> None:
    memory = training.config.memory
    forward = training.memory.account.peaks.get("forward", Peak())
    for unit, elements in too_small(forward.idle, memory).items():
        logger.warning(
            "memory.offload names %s, whose inputs have at most %d elements here and stay: "
            "memory.offload_min_elements = %d",
            unit,
            elements,
            memory.offload_min_elements,
        )


@contextmanager
def _noted(where: str) -> Iterator[None]:
    """Errors inside say where they happened."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


def _due(step: int, interval_steps: int | None) -> bool:
    return interval_steps is not None and step % interval_steps == 0


def _choices(training: Training, step: int) -> StepChoices | None:
    """Router choices to force, or a place for those of this step; collective."""
    config = training.config
    if config.train.replay_choices is not None:
        folder = RunDirectory(Path(config.train.replay_choices)).choices
        return load_choices(folder, step, data=training.data.train.state())
    return StepChoices(step=step, mode="record", table=RouterReplay()) if config.observe.record_choices else None


def _window(training: Training, progress: Progress) -> LoadWindow | None:
    return progress.window if training.config.model.balance.glob > 0 else None


def _advance(training: Training, progress: Progress, result: StepResult) -> None:
    progress.step += 1
    progress.tokens += result.scale.num_tokens
    if result.skipped:
        progress.skipped_in_a_row += 1
        rows = result.statistics.bad_rows.tolist()
        bad = [name for name, count in zip(training.router_names, rows, strict=True) if count]
        logger.warning(
            "step %d skipped: loss %s, gradient norm %s%s",
            progress.step,
            result.loss,
            result.gradient_norm,
            f"; router logits not finite in {', '.join(bad)}" if bad else "",
        )
        return
    progress.updates += 1
    progress.skipped_in_a_row = 0
    progress.window = LoadWindow(counts_LE=result.statistics.counts, num_tokens=result.scale.num_tokens)


def _record(
    training: Training,
    progress: Progress,
    tokens: StepTokens,
    result: StepResult,
    step_seconds: float,
    peak_bytes: int,
    eta_seconds: float,
) -> StepRecord:
    statistics = result.statistics
    counts_LE = statistics.counts.to(torch.float64)
    flops = sum(length * training.costs.flops_matmul(length) for length in tokens.lengths_N.tolist())
    return StepRecord(
        step=progress.step,
        loss=result.loss,
        lr=result.learning_rate,
        gnorm=result.gradient_norm,
        balance=float((counts_LE.amax(1) / counts_LE.mean(1)).mean()),
        dead=int((statistics.counts == 0).sum()),
        num_experts=statistics.counts.numel(),
        drop=int(statistics.dropped.sum()),
        aux_loss=float(statistics.aux.mean()),
        seq_loss=float(statistics.seq.mean()),
        global_loss=float(statistics.glob.mean()),
        z_loss=float(statistics.z.mean()),
        mtp_loss=result.losses.get("mtp", 0.0),
        tokens=progress.tokens,
        skipped=result.skipped,
        step_seconds=step_seconds,
        tokens_per_second=result.scale.num_tokens / step_seconds,
        flops_per_second=flops / step_seconds,
        work_balance=tokens.work_balance,
        memory_peak_bytes=peak_bytes,
        eta_seconds=eta_seconds,
        comm=result.traffic,
    )


def _validate(training: Training, step: int) -> ValidRecord:
    loss = validation_loss(training, training.config.train.valid_sequences)
    return ValidRecord(step=step, valid_loss=loss, valid_bits_per_byte=loss / math.log(2))


def _summary(training: Training, progress: Progress) -> dict[str, Any]:
    """What is known at the end only. Collective, because the sample comes from the model."""
    config, costs, entropy = training.config, training.costs, training.data.entropy
    summary: dict[str, Any] = {
        "steps": progress.step,
        "tokens": progress.tokens,
        "parameters": {"total": costs.parameters, "active": costs.active_parameters},
        "memory_peak_bytes": training.memory.largest_bytes,
        "flops_per_token": {
            "flops_matmul": costs.flops_matmul(config.data.sequence_length),
            "flops_published": costs.flops_published(config.data.sequence_length),
        },
        "corpus": {
            "name": config.data.corpus,
            "licence": CORPORA[config.data.corpus].licence,
            "sha256": CORPORA[config.data.corpus].sha256,
            "unigram_nats": entropy.unigram_nats,
            "bigram_nats": entropy.bigram_nats,
        },
    }
    if config.observe.sample_tokens > 0:
        prompt = config.observe.sample_prompt
        with _noted("while the sample was written"):
            text = generate_text(
                training, prompt, config.observe.sample_tokens, temperature=SAMPLE_TEMPERATURE, seed=config.train.seed
            )
        summary["sample"] = {"prompt": prompt, "text": text, "temperature": SAMPLE_TEMPERATURE}
    return summary
