"""The model families that come with the package. Importing this module does not import torch."""

from typing import TYPE_CHECKING

from moe_train.models.config import DecoderConfig
from moe_train.models.divisible import decoder_problems
from moe_train.models.flops import decoder_costs
from moe_train.models.spec import MODEL_INTERFACE_VERSION, CausalModel, ModelParts, ModelSpec
from moe_train.models.stages import shared_parameters, stages_of
from moe_train.models.units import decoder_units

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moe_memory.initialise import InitRule
    from moe_parallel import ParallelConfig, ParallelPlan


def _build(config: DecoderConfig, vocab_size: int, parts: ModelParts) -> "CausalModel":
    from moe_train.models.decoder import Decoder

    return Decoder(config, vocab_size, parts)


def _init_rules(config: DecoderConfig) -> "Sequence[tuple[str, InitRule]]":
    from moe_train.models.build import decoder_init_rules

    return decoder_init_rules(config)


def _plan(config: DecoderConfig, parallel: "ParallelConfig") -> "ParallelPlan":
    from moe_train.models.plan import decoder_plan

    return decoder_plan(config, parallel)


DECODER = ModelSpec(
    name="decoder",
    interface_version=MODEL_INTERFACE_VERSION,
    config=DecoderConfig,
    available=lambda: None,
    build=_build,
    init_rules=_init_rules,
    plan=_plan,
    stages=stages_of,
    shared=shared_parameters,
    problems=decoder_problems,
    internal_parameters=("*.router.weight",),
    costs=decoder_costs,
    units=decoder_units,
)
