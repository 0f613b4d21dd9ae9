"""Data-parallel engines behind one seam."""

import functools  # whole, as a module here is called partial
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from moe_memory.config import MemoryConfig, OptimConfig, state_problems
from moe_memory.data_parallel.engine import DataParallelEngine as DataParallelEngine, StateTensor as StateTensor
from moe_memory.data_parallel.sharded import ShardedEngine as ShardedEngine
from moe_memory.data_parallel.zero1 import Zero1 as Zero1
from moe_memory.errors import MoeMemoryError
from moe_memory.optim.decay import is_decayed
from moe_parallel import Groups, ShardSpec


def build_engine(
    memory: MemoryConfig,
    optim: OptimConfig,
    groups: Groups,
    *,
    compute_dtype: torch.dtype,
    keep_internal: Sequence[str] = (),
    decayed: Callable[[ShardSpec], bool] = is_decayed,
    seed: int = 0,
) -> DataParallelEngine:
    """The engine that the configuration names; the arguments are those of `ShardedEngine`.

    Raises:
        MoeMemoryError: everything that is wrong with the configuration, where the model computes in this dtype.
    """
    computes_in: Any = str(compute_dtype).removeprefix("torch.")
    memory = replace(memory, compute_dtype=computes_in)
    problems = [*memory.problems(), *optim.problems(), *state_problems(memory, optim)]
    if problems:
        raise MoeMemoryError("; ".join(map(str, problems)))
    engine: Callable[..., DataParallelEngine] = Zero1
    if memory.data_parallel == "fsdp":
        from moe_memory.data_parallel.fsdp import Fsdp  # only where it is wanted: it takes three seconds

        engine = functools.partial(Fsdp, reshard=memory.reshard, prefetch_units=memory.prefetch_units)
    return engine(
        optim,
        groups,
        compute_dtype=compute_dtype,
        keep_internal=keep_internal,
        decayed=decayed,
        seed=seed,
        bucket_bytes=round(memory.bucket_mib * 2**20),
        shard_replicas=memory.shard_replicas,
    )
