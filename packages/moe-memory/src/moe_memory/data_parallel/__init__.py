"""Data-parallel engines behind one seam."""

from collections.abc import Sequence

import torch

from moe_memory.config import MemoryConfig, OptimConfig
from moe_memory.data_parallel.engine import DataParallelEngine as DataParallelEngine, StateTensor as StateTensor
from moe_memory.data_parallel.zero1 import Zero1 as Zero1
from moe_parallel import Groups


def build_engine(
    memory: MemoryConfig,
    optim: OptimConfig,
    groups: Groups,
    *,
    compute_dtype: torch.dtype,
    keep_internal: Sequence[str] = (),
) -> DataParallelEngine:
    """The engine that the configuration names."""
    engines = {"zero1": Zero1}
    return engines[memory.data_parallel](optim, groups, compute_dtype=compute_dtype, keep_internal=keep_internal)
