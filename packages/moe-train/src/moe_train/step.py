"""One optimizer step: every microbatch forward and backward, one global norm, one update.

Shape legend: L layers, E experts.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from moe_memory.data_parallel.norm import clip_factor
from moe_memory.optim.schedule import learning_rate
from moe_parallel import reduce_norm_parts
from moe_parallel.pipeline.chunk import Segment, SegmentedChunk
from moe_parallel.pipeline.runtime import run_actions
from moe_parallel.pipeline.schedule import one_by_one
from moe_train.assemble import Training
from moe_train.choices import StepChoices
from moe_train.data.batch import Batch
from moe_train.models.statistics import RouterStatistics
from moe_train.scale import LoadWindow, MicrobatchScale, StepScale


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did.

    Attributes:
        loss: mean cross-entropy over the targets of the global batch, in nats (the first term of the loss of §0).
        gradient_norm: global L2 norm before clipping.
        learning_rate: that was, or would have been, applied.
        skipped: a non-finite loss or norm; weights, moments, expert bias and counters are as before the step.
        scale: the counts of the step.
        statistics: of all layers with a router, summed over the microbatches.
        losses: further terms of the loss by name, without coefficient.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    skipped: bool
    scale: StepScale
    statistics: RouterStatistics
    losses: Mapping[str, float]


def microbatch_loss(training: Training, batch: Batch) -> tuple[Tensor, Tensor]:
    """Of each target that this rank has in a forward outside training: its cross-entropy, zero where it does not count,
    and whether it does. Collective over the ranks that share the rows."""
    whole = training.tokens.padded(batch).to(training.device)
    part = training.tokens.of(whole)
    here = whole.each(part.rows)
    logits_BSV = training.model(here.token_BS, here.sequence_info(part.context), None).logits_BSV
    mask_T = here.target_mask_BS.flatten()
    return training.cross_entropy(logits_BSV.flatten(0, 1), here.target_BS.flatten(), mask_T), mask_T


@dataclass(frozen=True, kw_only=True)
class _Microbatch:
    """What the segments of one execution microbatch share: this rank's tokens, their weights, the model's context."""

    batch: Batch
    scale: MicrobatchScale
    model: Any


def forward_backward(
    training: Training, batch: Batch, scale: StepScale, window: LoadWindow | None, choices: StepChoices | None = None
) -> tuple[dict[str, Tensor], RouterStatistics]:
    """Add the gradients of this rank's share of a global batch; returns its part of statistics and losses by name.

    The loss is called `loss`; there are further terms of it that the model attached, without coefficient.

    Microbatches go through the layers as the schedule says; gradients are reported to the engine layer by layer.
    """
    losses: list[dict[str, Tensor]] = []
    statistics: list[RouterStatistics] = []
    microbatches = batch.microbatches(training.config.train.microbatch_sequences)

    def begin(index: int) -> tuple[Tensor, _Microbatch]:
        repeated = None if choices is None else choices.of(microbatches[index])
        whole = training.tokens.padded(microbatches[index]).to(training.device)
        part = training.tokens.of(whole)
        weights = scale.microbatch(whole, training.dtype, window, repeated).of(part)
        here = whole.each(part.rows)
        context = training.model.context(here.sequence_info(part.context), weights)
        return here.token_BS, _Microbatch(batch=here, scale=weights, model=context)

    def inside(segment: Segment[Any]) -> Segment[_Microbatch]:
        return replace(segment, run=lambda x, microbatch: segment.run(x, microbatch.model))

    def loss(logits_TV: Tensor, microbatch: _Microbatch) -> Tensor:
        target_BS, mask_BS = microbatch.batch.target_BS, microbatch.batch.target_mask_BS
        loss_T = training.cross_entropy(logits_TV, target_BS.flatten(), mask_BS.flatten())
        part = (loss_T * microbatch.scale.target_weight_T).sum()
        losses.append({"loss": part.detach(), **microbatch.model.losses})
        statistics.append(RouterStatistics.stack(microbatch.model.statistics))
        return part

    segments = [*map(inside, training.model.segments()), Segment("loss", (), loss)]
    run_actions(one_by_one(len(microbatches)), [SegmentedChunk(segments, begin)], training.engine.grads_ready)
    training.engine.finish()
    # In the order of the microbatches, whatever the schedule was.
    total = {name: reduce(operator.add, [part[name] for part in losses]) for name in losses[0]}
    return total, reduce(operator.add, statistics)


def run_step(
    training: Training,
    batch: Batch,
    *,
    updates: int,
    window: LoadWindow | None,
    choices: StepChoices | None = None,
    inspect: Callable[[], None] | None = None,
) -> StepResult:
    """Run one optimizer step on this rank's share of a global batch. Collective; the result is the same on all ranks.

    The host reads the loss and the norm, once each.

    Args:
        updates: updates so far; drives the learning-rate schedule, so that a skipped step delays it.
        window: expert load for the global balance loss.
        choices: what routers repeat, or a place for what they choose.
        inspect: called when all gradients are complete, before the update.
    """
    config = training.config
    training.model.train()
    train = config.train
    here = StepScale.count(
        batch,
        balance_sequences=train.balance_sequences,
        loss_norm=train.loss_norm,
        depths=training.model.depths,
    )
    scale = here.over(training.groups)
    losses_here, statistics_here = forward_backward(training, batch, scale, window, choices)
    if inspect is not None:
        inspect()
    statistics, sums = statistics_here.summed(torch.stack(list(losses_here.values())), training.groups)
    norm = reduce_norm_parts(training.engine.norm_parts(2.0), 2.0, training.groups)
    rate = learning_rate(config.optim, updates, config.train.steps)
    losses = dict(zip(losses_here, sums.tolist(), strict=True))
    loss_value, norm_value = losses.pop("loss"), norm.item()
    skipped = not (isfinite(loss_value) and isfinite(norm_value))
    if skipped:
        training.engine.skip()
    else:
        limit = config.optim.max_grad_norm
        training.engine.step(rate, 1.0 if limit is None else clip_factor(norm, limit))
        for router, counts_E in zip(training.model.routers(), statistics.counts, strict=True):
            router.update_bias(counts_E)
    return StepResult(
        loss=loss_value,
        gradient_norm=norm_value,
        learning_rate=rate,
        skipped=skipped,
        scale=scale,
        statistics=statistics,
        losses=losses,
    )
