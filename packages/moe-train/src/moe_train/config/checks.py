"""The rules of a configuration beyond types: those of each section, and those between sections."""

from collections.abc import Sequence
from dataclasses import fields, replace
from math import gcd
from typing import Any

from moe_kernels.registry import Registry
from moe_memory.config import state_problems
from moe_parallel.context.microbatches import group_sizes
from moe_parallel.layout import ParallelLayout
from moe_parallel.problem import Problem
from moe_parallel.topology import Topology
from moe_train.config.graphs import graph_problems
from moe_train.config.recompute import offload_staying_problems, recompute_problems
from moe_train.config.tree import TrainConfig
from moe_train.data.corpus import CORPORA
from moe_train.models.stages import schedule_of
from moe_train.plugins import MODELS, SINKS


def section_problems(config: TrainConfig) -> list[Problem]:
    """What sections say about themselves through `problems()`; a section without rules has none."""
    found: list[Problem] = []
    for field in fields(config):
        problems = getattr(getattr(config, field.name), "problems", None)
        if problems is not None:
            found += problems()
    return found


def cross_problems(config: TrainConfig, world: int) -> list[Problem]:
    """Rules that involve several sections or what is installed; the sections themselves must be legal."""
    layout = layout_of(config, world)
    found = layout.problems(num_experts=config.model.num_experts)
    return [
        *found,
        *([] if found else layout_problems(config, layout)),
        *_batch_problems(config),
        *_installed_problems(config),
    ]


def layout_of(config: TrainConfig, world: int) -> ParallelLayout:
    """The layout of a world of ranks, which may be illegal."""
    degrees = config.parallel
    return ParallelLayout(world=world, tp=degrees.tp, cp=degrees.cp, pp=degrees.pp, ep=degrees.ep, etp=degrees.etp)


def topology_of(config: TrainConfig, world: int) -> Topology:
    """The machines as `parallel.ranks_per_node` says; all ranks on one where it says nothing."""
    per_node = config.parallel.ranks_per_node or world
    return Topology.regular(world, ranks_per_node=per_node)


def mesh_of(config: TrainConfig, layout: ParallelLayout, topology: Topology | None = None) -> dict[str, Any]:
    """Arguments of `FoldedMesh` beside the layout; `topology` is by default what the configuration says of it."""
    topology = topology_of(config, layout.world) if topology is None else topology
    family = MODELS.get(config.model.kind)
    stages = family.stages(config.model, config.parallel)
    dynamic = config.parallel.dynamic_cp_tokens is not None
    return {
        "context_sizes": group_sizes(layout.cp * layout.dp) if dynamic else (),
        "cp_inner": config.parallel.cp_inner,
        # Every rank cuts its `ep` in the same way, also where the machines of some would allow longer runs.
        "ep_inner": gcd(*(topology.run_on_node(ranks) for ranks in layout.groups("ep"))),
        "shared": family.shared(config.model, stages),
    }


def layout_problems(config: TrainConfig, layout: ParallelLayout) -> list[Problem]:
    """Rules between a legal layout and everything else."""
    from moe_train.data.tokenizer import ByteTokenizer

    found: list[Problem] = []
    family = MODELS.get(config.model.kind)
    degrees = _context_degrees(config, layout)
    for cp in degrees:
        parallel = replace(config.parallel, cp=cp)
        more = family.problems(config.model, ByteTokenizer().vocab_size, parallel)
        found += [problem for problem in more if problem not in found]
    found += _dynamic_problems(config, degrees)
    found += _machine_problems(config, layout)
    found += _rows_problems(config)
    found += graph_problems(config, layout)
    found += recompute_problems(config)
    found += state_problems(config.memory, config.optim)
    found += _replica_problems(config, layout)
    if config.memory.data_parallel == "fsdp" and schedule_of(config.parallel).splits_backward:
        rule = "reduces gradients in every backward, and the schedule makes those of weights in a pass of their own"
        legal = "zero1, or another parallel.schedule"
        found.append(Problem(key="memory.data_parallel", value="fsdp", rule=rule, legal=legal))
    if not found:
        found += offload_staying_problems(config)
    train = config.train
    units = -(-train.global_batch_sequences // train.balance_sequences)
    if not found and units < layout.dp:
        found.append(
            Problem(
                key="train.global_batch_sequences",
                value=train.global_batch_sequences,
                rule=f"gives {units} balance microbatches of {train.balance_sequences} sequences to dp = {layout.dp} "
                "ranks, so that some would never have a token",
                legal=f"at least {layout.dp * train.balance_sequences}",
            )
        )
    return found


def _replica_problems(config: TrainConfig, layout: ParallelLayout) -> list[Problem]:
    size, replicas = config.memory.shard_replicas, layout.cp * layout.dp
    if size is None or size < 1 or replicas % size == 0:
        return []
    rule = f"does not divide the {replicas} replicas of cp * dp = {layout.cp} * {layout.dp}"
    legal = ", ".join(str(size) for size in range(1, replicas + 1) if replicas % size == 0) + ", or none"
    return [Problem(key="memory.shard_replicas", value=size, rule=rule, legal=legal)]


def _machine_problems(config: TrainConfig, layout: ParallelLayout) -> list[Problem]:
    per_node, world = config.parallel.ranks_per_node, layout.world
    if per_node is None or per_node < 1 or world % min(per_node, world) == 0:
        return []
    legal = ", ".join(str(size) for size in range(1, world + 1) if world % size == 0)
    return [
        Problem(
            key="parallel.ranks_per_node",
            value=per_node,
            rule=f"does not divide the world of {world} ranks into machines of equal size",
            legal=legal,
        )
    ]


def _rows_problems(config: TrainConfig) -> list[Problem]:
    """What a fixed number of rows cannot be combined with."""
    factor = getattr(config.comm, "rank_capacity_factor", None)
    if factor is None or config.parallel.dynamic_cp_tokens is None:
        return []
    rule = "fixes the rows of a rank, and with parallel.dynamic_cp_tokens microbatches have as many tokens as fit"
    return [Problem(key="comm.rank_capacity_factor", value=factor, rule=rule, legal="none")]


def _context_degrees(config: TrainConfig, layout: ParallelLayout) -> list[int]:
    """How many ranks may share a row."""
    if config.parallel.dynamic_cp_tokens is None:
        return [layout.cp]
    return sorted({layout.cp, *group_sizes(layout.cp * layout.dp)})


def _dynamic_problems(config: TrainConfig, degrees: Sequence[int]) -> list[Problem]:
    """What dynamic context parallelism cannot be combined with, and sequences that are too long for it."""
    tokens, found = config.parallel.dynamic_cp_tokens, []
    if tokens is None:
        return []
    fixed = "means something for microbatches of fixed sequences, which parallel.dynamic_cp_tokens does not make"
    if config.model.balance.aux > 0:
        legal = "0; balance.seq, balance.glob and the expert bias balance as well"
        found.append(Problem(key="model.balance.aux", value=config.model.balance.aux, rule=fixed, legal=legal))
    if config.train.loss_norm != "token":
        found.append(Problem(key="train.loss_norm", value=config.train.loss_norm, rule=fixed, legal="token"))
    if config.observe.record_choices or config.train.replay_choices is not None:
        key = "observe.record_choices" if config.observe.record_choices else "train.replay_choices"
        rule = "choices are kept by rows of one sequence, and parallel.dynamic_cp_tokens packs several into one"
        found.append(Problem(key=key, value=True, rule=rule))
    ranks = degrees[-1]
    step = 2 * ranks * config.parallel.tp
    longest = tokens * ranks // step * step
    if config.data.sequence_length > longest:
        rule = f"is more than {ranks} ranks hold with parallel.dynamic_cp_tokens = {tokens} each"
        value, legal = config.data.sequence_length, f"at most {longest}"
        found.append(Problem(key="data.sequence_length", value=value, rule=rule, legal=legal))
    return found


def _batch_problems(config: TrainConfig) -> list[Problem]:
    train, found = config.train, []
    if train.microbatch_sequences % train.balance_sequences:
        legal = [n for n in range(1, train.microbatch_sequences + 1) if train.microbatch_sequences % n == 0]
        found.append(
            Problem(
                key="train.balance_sequences",
                value=train.balance_sequences,
                rule=f"must divide train.microbatch_sequences = {train.microbatch_sequences}",
                legal=", ".join(map(str, legal)),
            )
        )
    if train.replay_choices is not None and config.observe.record_choices:
        rule = "choices that are repeated are recorded already; drop one of the two"
        found.append(Problem(key="observe.record_choices", value=True, rule=rule))
    if train.microbatch_sequences > train.global_batch_sequences:
        found.append(
            Problem(
                key="train.microbatch_sequences",
                value=train.microbatch_sequences,
                rule=f"is more than a whole step has, train.global_batch_sequences = {train.global_batch_sequences}",
                legal=f"1 to {train.global_batch_sequences}",
            )
        )
    return found


def _installed_problems(config: TrainConfig) -> list[Problem]:
    from moe_kernels.grouped_gemm import GROUPED_GEMM

    found = _missing("kernels.grouped_gemm", config.kernels.grouped_gemm, GROUPED_GEMM, "auto")
    if config.kernels.implementation == "triton" and config.memory.compute_dtype == "float64":
        rule = "kernels compute in float32 inside, and memory.compute_dtype is float64"
        found.append(Problem(key="kernels.implementation", value="triton", rule=rule, legal="auto, plain"))
    for sink in config.observe.sinks:
        found += _missing("observe.sinks", sink, SINKS)
    if config.data.corpus not in CORPORA:
        legal = ", ".join(sorted(CORPORA))
        found.append(Problem(key="data.corpus", value=config.data.corpus, rule="no such corpus ships", legal=legal))
    return found


def _missing(key: str, name: str, registry: Registry[Any], *also: str) -> list[Problem]:
    legal = [*also, *registry.names()]
    if name in legal:
        return []
    rule = f"no {registry.noun} of this name is installed"
    return [Problem(key=key, value=name, rule=rule, legal=", ".join(legal))]
