"""What must divide what for a decoder to be spread over ranks. Imports nothing heavy."""

from moe_parallel.config import ParallelConfig
from moe_parallel.context.rules import context_problems
from moe_parallel.pipeline.balance import even_problems
from moe_parallel.pipeline.layout import layout_problems
from moe_parallel.problem import Problem
from moe_train.models.config import DecoderConfig
from moe_train.models.stages import is_empty, schedule_of, stages_of


def decoder_problems(config: DecoderConfig, vocab_size: int, parallel: ParallelConfig) -> list[Problem]:
    """Every violated rule of `models/plan.py`."""
    tp, etp = parallel.tp, parallel.etp
    found = []
    if config.num_heads % tp:
        found.append(_problem("tp", tp, "model.num_heads", config.num_heads))
    elif config.attention == "grouped" and config.num_kv_heads % tp and tp % config.num_kv_heads:
        legal = [n for n in _divisors(config.num_heads) if not (config.num_kv_heads % n and n % config.num_kv_heads)]
        found.append(
            Problem(
                key="parallel.tp",
                value=tp,
                rule=f"must divide model.num_kv_heads = {config.num_kv_heads} or be a multiple of it, so that every "
                "rank reads whole key/value heads",
                legal=", ".join(map(str, legal)),
            )
        )
    features = {"dense_features": bool(config.dense_layers), "shared_features": True}
    for name, used in features.items():
        size = getattr(config, name)
        if used and size is not None and size % tp:
            found.append(_problem("tp", tp, f"model.{name}", size))
    if -(-vocab_size // tp) * (tp - 1) >= vocab_size:
        rule = f"leaves some ranks without an entry of the vocabulary of {vocab_size}"
        found.append(Problem(key="parallel.tp", value=tp, rule=rule))
    if config.expert_features % etp:
        found.append(_problem("etp", etp, "model.expert_features", config.expert_features))
    found += _pipeline_problems(config, parallel)
    if not found and parallel.cp > 1:
        heads = config.num_heads // tp
        kv_heads = heads if config.attention == "latent" else max(config.num_kv_heads // tp, 1)
        found += context_problems(
            parallel.cp_kind, cp=parallel.cp, heads=heads, kv_heads=kv_heads, inner=parallel.cp_inner
        )
    return found


def _pipeline_problems(config: DecoderConfig, parallel: ParallelConfig) -> list[Problem]:
    schedule = schedule_of(parallel)
    found = schedule.problems(pp=parallel.pp, vpp=parallel.vpp, num_microbatches=1)
    if found:
        return found
    if parallel.pipeline is None:
        return even_problems(config.num_layers, config.mtp_layers, pp=parallel.pp, vpp=parallel.vpp)
    found = layout_problems(
        parallel.pipeline,
        pp=parallel.pp,
        placement=schedule.placement,
        num_layers=config.num_layers,
        mtp_layers=config.mtp_layers,
    )
    if found:
        return found
    stages = stages_of(config, parallel)
    if stages.vpp != parallel.vpp:
        rule = f"parallel.pipeline has {stages.vpp} stages for each rank"
        found.append(Problem(key="parallel.vpp", value=parallel.vpp, rule=rule, legal=str(stages.vpp)))
    idle = [rank for rank in range(parallel.pp) if all(map(is_empty, stages.on_rank(rank)))]
    if idle:
        rule = f"leaves nothing to train on rank {idle[0]} of the pipeline"
        legal = "stages may be empty, all stages of a rank may not"
        found.append(Problem(key="parallel.pipeline", value=parallel.pipeline, rule=rule, legal=legal))
    return found


def _problem(axis: str, value: int, key: str, size: int) -> Problem:
    legal = ", ".join(map(str, _divisors(size)))
    return Problem(key=f"parallel.{axis}", value=value, rule=f"must divide {key} = {size}", legal=legal)


def _divisors(size: int) -> list[int]:
    return [number for number in range(1, size + 1) if size % number == 0]
