"""Units that a model does not have, that lie in each other, or that graphs have captured: of recompute and offload."""

from moe_memory.unit_choice import (
    RECOMPUTE_UNITS,
    entries_of,
    layer_problems,
    offload_problems,
    staying_problems,
    units_at,
)
from moe_parallel.problem import Problem
from moe_train.config.tree import TrainConfig
from moe_train.plugins import MODELS

# What runs inside a graph, whose backward is captured with it.
_CAPTURED = {"attn": {"layernorm", "mla_up_proj", "core_attn"}, "moe_router": {"moe"}}


def recompute_problems(config: TrainConfig) -> list[Problem]:
    """Every rule that `memory.recompute` and `memory.offload` violate."""
    key, entries, offload = "memory.recompute", entries_of(config.memory.recompute), config.memory.offload
    named = () if entries == ("full",) else entries
    if not named and not offload:
        return []
    layers = MODELS.get(config.model.kind).units(config.model)
    if not layers:
        rule = f"names units, and layers of model.kind = {config.model.kind!r} have none"
        if named:
            return [Problem(key=key, value=named, rule=rule, legal="none, full")]
        return [Problem(key="memory.offload", value=offload, rule=rule, legal="[]")]
    found = layer_problems(key, named, layers, RECOMPUTE_UNITS)
    return [*found, *offload_problems("memory.offload", offload, entries, layers)]


def offload_staying_problems(config: TrainConfig) -> list[Problem]:
    """Inputs that `memory.offload` names and that never leave; whatever else is said of them must be legal."""
    memory = config.memory
    if not memory.offload:
        return []
    family = MODELS.get(config.model.kind)
    units = family.units(config.model)
    stages = [
        {
            name: units[name]
            for name in (*(f"layers.{n}" for n in stage.layers), *(f"mtp.{n}" for n in stage.mtp_depths))
        }
        for stage in family.stages(config.model, config.parallel).stages
    ]
    fraction, keep = memory.offload_fraction, memory.offload_keep_layers
    return staying_problems("memory.offload", memory.offload, stages, fraction=fraction, keep=keep)


def captured_units(config: TrainConfig) -> list[str]:
    """Those of `memory.recompute` of which a part is inside a graph."""
    entries = entries_of(config.memory.recompute)
    captured = {"full"}.union(*(_CAPTURED.get(scope, ()) for scope in config.kernels.graph_scopes))
    if entries == ("full",):
        return ["full"]
    layers = MODELS.get(config.model.kind).units(config.model)
    return sorted({unit for layer in layers for unit in units_at(entries, layer) & captured})


def static_inputs(config: TrainConfig) -> list[str]:
    """Those of `memory.offload` that are static buffers of graphs, or read by one."""
    outside = {"expert_fc1", "moe_act"}
    layers = MODELS.get(config.model.kind).units(config.model)
    return sorted({unit for layer in layers for unit in units_at(config.memory.offload, layer) - outside})
