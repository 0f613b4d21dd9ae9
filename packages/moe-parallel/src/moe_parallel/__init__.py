"""moe-parallel: which rank does what."""

from importlib import import_module
from typing import TYPE_CHECKING

from moe_parallel._version import __version__ as __version__

if TYPE_CHECKING:
    from moe_parallel.attention.core import AttentionCore as AttentionCore
    from moe_parallel.attention.local import LocalAttention as LocalAttention
    from moe_parallel.collectives import (
        CollectiveError as CollectiveError,
        add_up as add_up,
        all_gather as all_gather,
        all_reduce as all_reduce,
        all_to_all as all_to_all,
        reduce_scatter as reduce_scatter,
    )
    from moe_parallel.config import ParallelConfig as ParallelConfig
    from moe_parallel.context.balance import (
        document_numbers as document_numbers,
        head_tail as head_tail,
        join_slots as join_slots,
        padded_slots as padded_slots,
        per_document as per_document,
        select_slots as select_slots,
        split_context as split_context,
    )
    from moe_parallel.context.choose import context_attention as context_attention
    from moe_parallel.context.dynamic import fixed_plan as fixed_plan, plan_context as plan_context
    from moe_parallel.context.gather import GatherAttention as GatherAttention
    from moe_parallel.context.hierarchical import HierarchicalAttention as HierarchicalAttention
    from moe_parallel.context.microbatches import (
        ContextPlan as ContextPlan,
        SequenceWork as SequenceWork,
        group_sizes as group_sizes,
    )
    from moe_parallel.context.ring import RingAttention as RingAttention
    from moe_parallel.context.rules import context_problems as context_problems
    from moe_parallel.context.ulysses import AllToAllAttention as AllToAllAttention
    from moe_parallel.distribute import (
        ModuleRule as ModuleRule,
        ParallelPlan as ParallelPlan,
        apply_plan as apply_plan,
        without_storage as without_storage,
    )
    from moe_parallel.errors import MoeParallelError as MoeParallelError
    from moe_parallel.forked import run_distributed as run_distributed
    from moe_parallel.gradients import (
        counts_here as counts_here,
        gradient_axes as gradient_axes,
        reduce_norm_parts as reduce_norm_parts,
        replica_axes as replica_axes,
    )
    from moe_parallel.groups import AxisGroups as AxisGroups, Groups as Groups, context_axis as context_axis
    from moe_parallel.layout import ParallelLayout as ParallelLayout
    from moe_parallel.mesh import FoldedMesh as FoldedMesh
    from moe_parallel.pending import Pending as Pending
    from moe_parallel.pipeline.balance import even_layout as even_layout
    from moe_parallel.pipeline.layout import PipelineLayout as PipelineLayout
    from moe_parallel.pipeline.schedules.table import SCHEDULES as SCHEDULES, Schedule as Schedule
    from moe_parallel.pipeline.simulate import Durations as Durations, simulate as simulate
    from moe_parallel.plan import PlanRule as PlanRule, local_box as local_box, shard_specs as shard_specs
    from moe_parallel.point_to_point import shift as shift
    from moe_parallel.problem import Problem as Problem
    from moe_parallel.sequence import ContextSplit as ContextSplit, SequenceInfo as SequenceInfo
    from moe_parallel.sharding import Box as Box, ParameterKind as ParameterKind, ShardSpec as ShardSpec
    from moe_parallel.steps import Step as Step, StepKind as StepKind, run_steps as run_steps
    from moe_parallel.styles import (
        Boundary as Boundary,
        SharedPieces as SharedPieces,
        SplitVocabulary as SplitVocabulary,
        Style as Style,
    )
    from moe_parallel.tensor import (
        gather_rows as gather_rows,
        join_rows as join_rows,
        split_rows as split_rows,
        sum_everywhere as sum_everywhere,
        sum_gradients as sum_gradients,
        sum_outputs as sum_outputs,
        sum_scatter_rows as sum_scatter_rows,
    )
    from moe_parallel.topology import LinkClass as LinkClass, Topology as Topology
    from moe_parallel.vocabulary import (
        VocabularyEmbedding as VocabularyEmbedding,
        vocabulary_cross_entropy as vocabulary_cross_entropy,
    )
    from moe_parallel.world import (
        Place as Place,
        RankError as RankError,
        agree as agree,
        gather_json as gather_json,
        joined as joined,
        machines as machines,
        together as together,
    )

# Public name to module. Loaded on first use, so that configuration and the command line work without importing torch.
_MODULE_OF = {
    "add_up": "collectives",
    "agree": "world",
    "all_gather": "collectives",
    "all_reduce": "collectives",
    "all_to_all": "collectives",
    "AllToAllAttention": "context.ulysses",
    "apply_plan": "distribute",
    "AttentionCore": "attention.core",
    "AxisGroups": "groups",
    "Boundary": "styles",
    "Box": "sharding",
    "CollectiveError": "collectives",
    "context_attention": "context.choose",
    "context_axis": "groups",
    "context_problems": "context.rules",
    "ContextPlan": "context.microbatches",
    "ContextSplit": "sequence",
    "counts_here": "gradients",
    "document_numbers": "context.balance",
    "Durations": "pipeline.simulate",
    "even_layout": "pipeline.balance",
    "fixed_plan": "context.dynamic",
    "FoldedMesh": "mesh",
    "gather_json": "world",
    "gather_rows": "tensor",
    "GatherAttention": "context.gather",
    "gradient_axes": "gradients",
    "group_sizes": "context.microbatches",
    "Groups": "groups",
    "head_tail": "context.balance",
    "HierarchicalAttention": "context.hierarchical",
    "join_rows": "tensor",
    "join_slots": "context.balance",
    "joined": "world",
    "LinkClass": "topology",
    "local_box": "plan",
    "LocalAttention": "attention.local",
    "machines": "world",
    "ModuleRule": "distribute",
    "MoeParallelError": "errors",
    "padded_slots": "context.balance",
    "ParallelConfig": "config",
    "ParallelLayout": "layout",
    "ParallelPlan": "distribute",
    "ParameterKind": "sharding",
    "Pending": "pending",
    "per_document": "context.balance",
    "PipelineLayout": "pipeline.layout",
    "Place": "world",
    "plan_context": "context.dynamic",
    "PlanRule": "plan",
    "Problem": "problem",
    "RankError": "world",
    "reduce_norm_parts": "gradients",
    "reduce_scatter": "collectives",
    "replica_axes": "gradients",
    "RingAttention": "context.ring",
    "run_distributed": "forked",
    "run_steps": "steps",
    "Schedule": "pipeline.schedules.table",
    "SCHEDULES": "pipeline.schedules.table",
    "select_slots": "context.balance",
    "SequenceInfo": "sequence",
    "SequenceWork": "context.microbatches",
    "shard_specs": "plan",
    "ShardSpec": "sharding",
    "SharedPieces": "styles",
    "shift": "point_to_point",
    "simulate": "pipeline.simulate",
    "split_context": "context.balance",
    "split_rows": "tensor",
    "SplitVocabulary": "styles",
    "Step": "steps",
    "StepKind": "steps",
    "Style": "styles",
    "sum_everywhere": "tensor",
    "sum_gradients": "tensor",
    "sum_outputs": "tensor",
    "sum_scatter_rows": "tensor",
    "together": "world",
    "Topology": "topology",
    "vocabulary_cross_entropy": "vocabulary",
    "VocabularyEmbedding": "vocabulary",
    "without_storage": "distribute",
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
