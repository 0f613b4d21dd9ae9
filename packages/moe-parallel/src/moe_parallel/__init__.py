"""moe-parallel: which rank does what."""

from importlib import import_module
from typing import TYPE_CHECKING

from moe_parallel._version import __version__ as __version__

if TYPE_CHECKING:
    from moe_parallel.attention import AttentionCore as AttentionCore, LocalAttention as LocalAttention
    from moe_parallel.config import ParallelConfig as ParallelConfig
    from moe_parallel.errors import MoeParallelError as MoeParallelError
    from moe_parallel.groups import AxisGroups as AxisGroups, Groups as Groups
    from moe_parallel.layout import ParallelLayout as ParallelLayout
    from moe_parallel.pending import Pending as Pending
    from moe_parallel.problem import Problem as Problem
    from moe_parallel.sequence import SequenceInfo as SequenceInfo
    from moe_parallel.sharding import Box as Box, ParameterKind as ParameterKind, ShardSpec as ShardSpec
    from moe_parallel.steps import Step as Step, StepKind as StepKind, run_steps as run_steps

# Public name to module. Loaded on first use, so that configuration and the command line work without importing torch.
_MODULE_OF = {
    "AttentionCore": "attention",
    "AxisGroups": "groups",
    "Box": "sharding",
    "Groups": "groups",
    "LocalAttention": "attention",
    "MoeParallelError": "errors",
    "ParallelConfig": "config",
    "ParallelLayout": "layout",
    "ParameterKind": "sharding",
    "Pending": "pending",
    "Problem": "problem",
    "run_steps": "steps",
    "SequenceInfo": "sequence",
    "ShardSpec": "sharding",
    "Step": "steps",
    "StepKind": "steps",
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
