"""moe-parallel: which rank does what."""

from importlib import import_module
from typing import TYPE_CHECKING

from moe_parallel._version import __version__ as __version__

if TYPE_CHECKING:
    from moe_parallel.attention import AttentionCore as AttentionCore, LocalAttention as LocalAttention
    from moe_parallel.collectives import (
        CollectiveError as CollectiveError,
        all_gather as all_gather,
        all_reduce as all_reduce,
        all_to_all as all_to_all,
        reduce_scatter as reduce_scatter,
    )
    from moe_parallel.config import ParallelConfig as ParallelConfig
    from moe_parallel.errors import MoeParallelError as MoeParallelError
    from moe_parallel.forked import run_distributed as run_distributed
    from moe_parallel.gradients import (
        counts_here as counts_here,
        gradient_axes as gradient_axes,
        reduce_norm_parts as reduce_norm_parts,
        replica_axes as replica_axes,
    )
    from moe_parallel.groups import AxisGroups as AxisGroups, Groups as Groups
    from moe_parallel.layout import ParallelLayout as ParallelLayout
    from moe_parallel.mesh import FoldedMesh as FoldedMesh
    from moe_parallel.pending import Pending as Pending
    from moe_parallel.plan import PlanRule as PlanRule, local_box as local_box, shard_specs as shard_specs
    from moe_parallel.problem import Problem as Problem
    from moe_parallel.sequence import SequenceInfo as SequenceInfo
    from moe_parallel.sharding import Box as Box, ParameterKind as ParameterKind, ShardSpec as ShardSpec
    from moe_parallel.steps import Step as Step, StepKind as StepKind, run_steps as run_steps
    from moe_parallel.topology import LinkClass as LinkClass, Topology as Topology
    from moe_parallel.world import (
        Place as Place,
        RankError as RankError,
        agree as agree,
        gather_json as gather_json,
        joined as joined,
        together as together,
    )

# Public name to module. Loaded on first use, so that configuration and the command line work without importing torch.
_MODULE_OF = {
    "agree": "world",
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "all_to_all": "collectives",
    "AttentionCore": "attention",
    "AxisGroups": "groups",
    "Box": "sharding",
    "CollectiveError": "collectives",
    "counts_here": "gradients",
    "FoldedMesh": "mesh",
    "gather_json": "world",
    "gradient_axes": "gradients",
    "Groups": "groups",
    "joined": "world",
    "LinkClass": "topology",
    "local_box": "plan",
    "LocalAttention": "attention",
    "MoeParallelError": "errors",
    "ParallelConfig": "config",
    "ParallelLayout": "layout",
    "ParameterKind": "sharding",
    "Pending": "pending",
    "Place": "world",
    "PlanRule": "plan",
    "Problem": "problem",
    "RankError": "world",
    "reduce_norm_parts": "gradients",
    "reduce_scatter": "collectives",
    "replica_axes": "gradients",
    "run_distributed": "forked",
    "run_steps": "steps",
    "SequenceInfo": "sequence",
    "shard_specs": "plan",
    "ShardSpec": "sharding",
    "Step": "steps",
    "StepKind": "steps",
    "together": "world",
    "Topology": "topology",
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
