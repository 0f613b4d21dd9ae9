"""One optimizer step: every microbatch forward and backward, one global norm, one update.

Shape legend: L layers, E experts.
"""

from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from moe_kernels.cross_entropy import cross_entropy
from moe_memory.data_parallel.norm import clip_factor, global_norm
from moe_memory.optim.schedule import learning_rate
from moe_train.assemble import Training
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
        skipped: a non-finite loss or norm; weights, moments and counters are as before the step.
        scale: the counts of the step.
        statistics: of all layers, summed over the microbatches.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    skipped: bool
    scale: StepScale
    statistics: RouterStatistics


def microbatch_loss(training: Training, batch: Batch, scale: MicrobatchScale | None) -> tuple[Tensor, RouterStatistics]:
    """Cross-entropy of each target [T], zero where masked, and the router statistics of one forward."""
    output = training.model(batch.token_BS, batch.sequence_info(), scale)
    loss_T = cross_entropy(
        output.logits_BSV.flatten(0, 1), batch.target_BS.flatten(), valid_T=batch.target_mask_BS.flatten()
    )
    return loss_T, output.statistics


def forward_backward(
    training: Training, batch: Batch, scale: StepScale, window: LoadWindow | None
) -> tuple[Tensor, RouterStatistics]:
    """Add the gradients of every execution microbatch of a global batch; returns loss and statistics of the whole."""
    loss = torch.zeros((), dtype=training.dtype, device=training.device)
    statistics: RouterStatistics | None = None
    microbatches = batch.microbatches(training.config.train.microbatch_sequences)
    for index, microbatch in enumerate(microbatches):
        on_device = microbatch.to(training.device)
        weights = scale.microbatch(on_device, training.dtype, window)
        loss_T, found = microbatch_loss(training, on_device, weights)
        part = (loss_T * weights.target_weight_T).sum()
        torch.autograd.backward(part)
        training.engine.grads_ready(training.parameter_names, last=index == len(microbatches) - 1)
        loss += part.detach()
        statistics = found if statistics is None else statistics + found
    assert statistics is not None
    training.engine.finish()
    return loss, statistics


def run_step(training: Training, batch: Batch, *, updates: int, window: LoadWindow | None) -> StepResult:
    """Run one optimizer step on a global batch.

    `updates` counts the updates so far and drives the learning-rate schedule, so that a skipped step delays it. The
    host reads the loss and the norm, once each.
    """
    config = training.config
    training.model.train()
    scale = StepScale.count(batch, balance_sequences=config.train.balance_sequences, loss_norm=config.train.loss_norm)
    loss, statistics = forward_backward(training, batch, scale, window)
    norm = global_norm(training.engine.norm_parts(2.0), 2.0)
    rate = learning_rate(config.optim, updates, config.train.steps)
    loss_value, norm_value = loss.item(), norm.item()
    skipped = not (isfinite(loss_value) and isfinite(norm_value))
    if skipped:
        training.engine.skip()
    else:
        limit = config.optim.max_grad_norm
        training.engine.step(rate, 1.0 if limit is None else clip_factor(norm, limit))
    return StepResult(
        loss=loss_value,
        gradient_norm=norm_value,
        learning_rate=rate,
        skipped=skipped,
        scale=scale,
        statistics=statistics,
    )
