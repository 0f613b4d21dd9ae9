"""One optimizer step: every microbatch forward and backward, one global norm, one update.

Shape legend: L layers, E experts.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from math import isfinite

import torch
from torch import Tensor

from moe_comm import record_traffic, refuse_overflow
from moe_memory.data_parallel.norm import clip_factor
from moe_memory.measure import within
from moe_memory.optim.schedule import learning_rate
from moe_parallel import reduce_norm_parts
from moe_parallel.pipeline.runtime import run_actions
from moe_train.assemble import Training
from moe_train.choices import StepChoices
from moe_train.chunks import build_chunks
from moe_train.data.batch import Batch
from moe_train.data.microbatches import Microbatch
from moe_train.graphs import readable
from moe_train.models.statistics import RouterStatistics
from moe_train.observe.record import StepTraffic
from moe_train.scale import LoadWindow, MicrobatchScale, StepScale, most_segments
from moe_train.traffic import traffic_here, traffic_of_all


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
        traffic: of all dispatchers on all ranks.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    skipped: bool
    scale: StepScale
    statistics: RouterStatistics
    losses: Mapping[str, float]
    traffic: StepTraffic


def forward_backward(
    training: Training,
    microbatches: Sequence[Microbatch],
    scale: StepScale,
    window: LoadWindow | None,
    choices: StepChoices | None = None,
    *,
    updates: int = 0,
) -> tuple[dict[str, Tensor], RouterStatistics]:
    """Add the gradients of this rank's share of a step; returns its part of statistics and losses by name.

    The loss is called `loss`; there are further terms of it that the model attached, without coefficient.

    Microbatches go through the layers as the schedule says; gradients are reported to the engine layer by layer.
    """

    def weights(index: int, whole: Batch) -> MicrobatchScale:
        batch = microbatches[index].batch
        repeated = None if choices is None else choices.of(batch)
        found = scale.microbatch(
            whole,
            training.dtype,
            window,
            repeated,
            row_segments=most_segments(batch),
            seed=training.config.train.seed,
            step=updates,
        )
        return readable(found) if is_graphed else found

    def grads_ready(names: Collection[str], *, last: bool) -> None:
        with training.memory.phase("backward"), within("reduction", "gradients"):
            training.engine.grads_ready(names, last=last)

    chunks = build_chunks(training, microbatches, weights)
    schedule, groups = training.schedule, training.groups
    vpp = training.stages.vpp
    actions = schedule.order(groups.size("pp"), groups.rank("pp"), len(microbatches), vpp)
    graphs: AbstractContextManager[bool]
    graphs = nullcontext(False) if training.graphs is None else training.graphs.step(microbatches, window)
    with graphs as is_graphed:
        if is_graphed:
            # Graphs read them without calling their modules.
            training.engine.synchronize()
        run_actions(actions, [chunk.passes for chunk in chunks], grads_ready, training.messages)
    with training.memory.phase("reduce"), within("reduction", "gradients"):
        training.engine.finish()
    statistics = RouterStatistics.nothing(
        len(training.router_names), training.config.model.num_experts, training.dtype, training.device
    )
    names = ["loss", *(["mtp"] if training.model.depths else [])]
    losses = {name: torch.zeros((), dtype=training.dtype, device=training.device) for name in names}
    routers = iter(training.model.routers())
    for chunk in chunks:
        # In the order of the microbatches, whatever the schedule was.
        rows = [router.row for router in islice(routers, len(chunk.statistics[0]))]
        row_L = torch.tensor(rows, dtype=torch.int64, device=training.device)
        for number in range(len(microbatches)):
            statistics.add_(row_L, chunk.statistics[number])
            for name, value in chunk.losses[number].items():
                losses[name] += value
    return losses, statistics


def run_step(
    training: Training,
    microbatches: Sequence[Microbatch],
    *,
    updates: int,
    window: LoadWindow | None,
    choices: StepChoices | None = None,
    inspect: Callable[[], None] | None = None,
) -> StepResult:
    """Run one optimizer step on this rank's microbatches. Collective; the result is the same on all ranks.

    The host reads the loss and the norm, once each, and where rows are fixed how many choices found none.

    Raises:
        MoeCommError: more choices than `comm.rank_capacity_factor` has rows for, unless they are to be dropped; on all
            ranks, before the update.

    Args:
        updates: updates so far; drives the learning-rate schedule, so that a skipped step delays it, and is part of
            the key of what tokens draw.
        window: expert load for the global balance loss.
        choices: what routers repeat, or a place for what they choose.
        inspect: called when all gradients are complete, before the update.
    """
    config = training.config
    training.model.train()
    train = config.train
    # Ranks that share rows count them once.
    counted = [part.batch for part in microbatches if training.groups.rank(part.axis) == 0]
    here = StepScale.count(
        counted,
        balance_sequences=train.balance_sequences,
        loss_norm=train.loss_norm,
        depths=training.model.depths,
    )
    scale = here.over(training.groups)
    with record_traffic() as ledger:
        losses_here, statistics_here = forward_backward(training, microbatches, scale, window, choices, updates=updates)
    if inspect is not None:
        inspect()
    statistics, sums = statistics_here.summed(torch.stack(list(losses_here.values())), training.groups)
    if training.sizing.capacity_rows is not None:
        refuse_overflow(int(statistics.overflow.sum()), training.sizing)
    with training.memory.phase("reduce"):
        norm = reduce_norm_parts(training.engine.norm_parts(2.0), 2.0, training.groups)
    rate = learning_rate(config.optim, updates, config.train.steps)
    losses = dict(zip(losses_here, sums.tolist(), strict=True))
    loss_value, norm_value = losses.pop("loss"), norm.item()
    skipped = not (isfinite(loss_value) and isfinite(norm_value))
    if skipped:
        training.engine.skip()
    else:
        limit = config.optim.max_grad_norm
        with training.memory.phase("update"), within("update", "temporary"):
            training.engine.step(rate, 1.0 if limit is None else clip_factor(norm, limit))
        for router in training.model.routers():
            router.update_bias(statistics.counts[router.row])
    return StepResult(
        loss=loss_value,
        gradient_norm=norm_value,
        learning_rate=rate,
        skipped=skipped,
        scale=scale,
        statistics=statistics,
        losses=losses,
        traffic=traffic_of_all(traffic_here(ledger, training.topology), training.groups),
    )
