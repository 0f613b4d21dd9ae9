"""A decoder over the ranks of a pipeline: its stages, and what of the model each needs. Imports nothing heavy."""

from collections.abc import Mapping, Sequence

from moe_parallel.config import ParallelConfig
from moe_parallel.pipeline.balance import even_layout
from moe_parallel.pipeline.layout import PipelineLayout, Stage
from moe_parallel.pipeline.schedules.table import SCHEDULES, Schedule
from moe_train.models.config import DecoderConfig


def schedule_of(parallel: ParallelConfig) -> Schedule:
    """The schedule of a configuration."""
    if parallel.schedule != "auto":
        return SCHEDULES[parallel.schedule]
    return SCHEDULES["one_f_one_b" if parallel.vpp == 1 else "interleaved"]


def stages_of(config: DecoderConfig, parallel: ParallelConfig) -> PipelineLayout:
    """The stages of a configuration.

    Raises:
        MoeParallelError: the model cannot be shared out so.
    """
    placement = schedule_of(parallel).placement
    if parallel.pipeline is None:
        return even_layout(config.num_layers, config.mtp_layers, pp=parallel.pp, vpp=parallel.vpp, placement=placement)
    return PipelineLayout.parse(
        parallel.pipeline,
        pp=parallel.pp,
        placement=placement,
        num_layers=config.num_layers,
        mtp_layers=config.mtp_layers,
    )


def is_empty(stage: Stage) -> bool:
    """Whether a stage passes on what it gets."""
    return not (stage.layers or stage.mtp_depths or stage.has_embedding or stage.has_loss)


def needs_embedding(config: DecoderConfig, stage: Stage) -> bool:
    """Whether a stage reads the embedding: to look up tokens, or as the output projection."""
    predicts = stage.has_loss or bool(stage.mtp_depths)
    return stage.has_embedding or bool(stage.mtp_depths) or (config.tied_embeddings and predicts)


def needs_head(stage: Stage) -> bool:
    """Whether a stage has an output projection."""
    return stage.has_loss or bool(stage.mtp_depths)


def has_norm(config: DecoderConfig, stage: Stage) -> bool:
    """Whether the last norm is in a stage: it comes before multi-token prediction."""
    return bool(stage.mtp_depths) if config.mtp_layers else stage.has_loss


def shared_parameters(config: DecoderConfig, layout: PipelineLayout) -> Mapping[str, Sequence[int]]:
    """Pipeline ranks that hold the embedding and the output projection, by axis (`SHARED_AXES` of moe-parallel)."""

    def ranks(needed: Sequence[bool]) -> list[int]:
        return sorted({layout.places.rank_of(stage) for stage, needs in enumerate(needed) if needs})

    found = {"pp_embedding": ranks([needs_embedding(config, stage) for stage in layout.stages])}
    if not config.tied_embeddings:
        found["pp_head"] = ranks([needs_head(stage) for stage in layout.stages])
    return found
