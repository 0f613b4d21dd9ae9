"""The stages of this rank as chunks of a pipeline: what a microbatch is on its way through them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moe_kernels.grouped_gemm.autograd import weight_gradients_to
from moe_memory.measure import open_account
from moe_parallel.pipeline.chunk import Segment, SegmentedChunk
from moe_parallel.pipeline.layout import Stage
from moe_parallel.pipeline.runtime import run_forward
from moe_parallel.pipeline.weight_work import WeightWork
from moe_train.assemble import Training
from moe_train.data.batch import Batch
from moe_train.data.microbatches import Microbatch
from moe_train.data.tokens import TokenPart
from moe_train.models.statistics import RouterStatistics
from moe_train.scale import MicrobatchScale

# Weights of the whole rows of a microbatch, by its number.
Weights = Callable[[int, Batch], MicrobatchScale | None]


@dataclass(frozen=True, kw_only=True)
class _Microbatch:
    """What the segments of one execution microbatch share: this rank's tokens, their weights, the model's context."""

    batch: Batch
    scale: MicrobatchScale | None
    model: Any


@dataclass
class StageChunk:
    """A stage of this rank.

    Attributes:
        passes: what the runtime executes.
        statistics, losses: what the forward of each microbatch leaves, by its number.
    """

    passes: "SegmentedChunk[_Microbatch]"
    statistics: dict[int, list[RouterStatistics]]
    losses: dict[int, dict[str, Tensor]]


def build_chunks(training: Training, microbatches: Sequence[Microbatch], weights: Weights) -> list[StageChunk]:
    """The chunks of this rank for the microbatches of a step; with weights None the last one returns logits [T, V]."""
    stages = training.stages.on_rank(training.groups.rank("pp"))
    segments = [training.model.segments(stage) for stage in stages]
    # A parameter of several chunks belongs to the first: its backward comes last.
    seen: set[str] = set()
    for place, found in enumerate(segments):
        segments[place] = [
            replace(segment, parameters=tuple(name for name in segment.parameters if name not in seen))
            for segment in found
        ]
        seen |= {name for segment in found for name in segment.parameters}
    return [
        _chunk(training, stage, found, microbatches, weights) for stage, found in zip(stages, segments, strict=True)
    ]


def microbatch_logits(training: Training, batch: Batch) -> tuple[Batch, Tensor | None]:
    """A forward outside training: this rank's part of the batch, and its logits where the last stage is.

    Collective over the ranks that share the rows and those of the pipeline.
    """
    microbatch = Microbatch(batch=batch)
    chunks = build_chunks(training, [microbatch], lambda *_: None)
    logits_TV = run_forward([chunk.passes for chunk in chunks], training.messages)
    return _here(training, microbatch)[0], logits_TV


def _here(training: Training, microbatch: Microbatch) -> tuple[Batch, TokenPart, Batch]:
    """This rank's tokens of a microbatch, which part they are, and the whole rows."""
    whole = training.tokens.padded(microbatch.batch, microbatch.axis).to(training.device)
    part = training.tokens.of(whole, microbatch.axis, slots=microbatch.batch.token_BS.shape[1])
    return whole.each(part.rows), part, whole


def _chunk(
    training: Training,
    stage: Stage,
    parts: Sequence[Segment[Any]],
    microbatches: Sequence[Microbatch],
    weights: Weights,
) -> StageChunk:
    statistics: dict[int, list[RouterStatistics]] = {}
    losses: dict[int, dict[str, Tensor]] = {}
    weight_work = WeightWork(dict(training.model.named_parameters())) if training.schedule.splits_backward else None

    def begin(index: int) -> tuple[Tensor, _Microbatch]:
        here, part, whole = _here(training, microbatches[index])
        scale = weights(index, whole)
        scale = None if scale is None else scale.of(part)
        context = training.model.context(part.info(here), scale)
        # Not the context itself, whose tables would live as long.
        statistics[index], losses[index] = context.statistics, context.losses
        microbatch = _Microbatch(batch=here, scale=scale, model=context)
        return here.token_BS if stage.has_embedding else _between(training, here), microbatch

    def inside(segment: Segment[Any]) -> Segment[_Microbatch]:
        def run(x: Tensor, microbatch: _Microbatch) -> Tensor:
            if (account := open_account()) is not None:
                account.adopt([x], "inputs")
            if weight_work is None:
                return segment.run(x, microbatch.model)
            with weight_gradients_to(weight_work):
                return segment.run(x, microbatch.model)

        return replace(segment, run=run)

    def loss(logits_TV: Tensor, microbatch: _Microbatch) -> Tensor:
        if microbatch.scale is None:
            return logits_TV
        batch = microbatch.batch
        loss_T = training.cross_entropy(logits_TV, batch.target_BS.flatten(), batch.target_mask_BS.flatten())
        part = (loss_T * microbatch.scale.target_weight_T).sum()
        microbatch.model.losses["loss"] = part.detach()
        return part

    segments = [inside(segment) for segment in parts]
    if stage.has_loss:
        segments.append(Segment("loss", (), loss))
    passes = SegmentedChunk(
        segments, begin, ends=stage.has_loss, weight_work=weight_work, around=training.memory.segment
    )
    return StageChunk(passes, statistics, losses)


def _between(training: Training, here: Batch) -> Tensor:
    """What comes from the stage before: features of the tokens that this rank has between two layers."""
    tokens, model = here.token_BS.numel(), training.model
    if training.config.parallel.sequence_parallel:
        tokens //= training.groups.size("tp")
    dtype: torch.dtype = getattr(torch, training.config.memory.compute_dtype)
    return torch.empty(tokens, model.features, dtype=dtype, device=training.device)
