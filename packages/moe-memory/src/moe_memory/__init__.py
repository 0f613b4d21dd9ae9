"""moe-memory: what lives where and when."""

from importlib import import_module
from typing import TYPE_CHECKING

from moe_memory._version import __version__ as __version__

if TYPE_CHECKING:
    from moe_memory.config import MemoryConfig as MemoryConfig, OptimConfig as OptimConfig
    from moe_memory.copies import CopyEngine as CopyEngine, CudaCopies as CudaCopies, FakeCopies as FakeCopies
    from moe_memory.data_parallel import ShardedEngine as ShardedEngine, Zero1 as Zero1, build_engine as build_engine
    from moe_memory.data_parallel.engine import DataParallelEngine as DataParallelEngine, StateTensor as StateTensor
    from moe_memory.data_parallel.fsdp import Fsdp as Fsdp
    from moe_memory.data_parallel.norm import clip_factor as clip_factor
    from moe_memory.errors import MoeMemoryError as MoeMemoryError
    from moe_memory.initialise import (
        InitRule as InitRule,
        constant as constant,
        draw as draw,
        normal as normal,
        ones as ones,
        zeros as zeros,
    )
    from moe_memory.measure import (
        LiveBytes as LiveBytes,
        MemoryAccount as MemoryAccount,
        PeakMemory as PeakMemory,
        SavedBytes as SavedBytes,
    )
    from moe_memory.offload import Offload as Offload, OffloadRules as OffloadRules, memory_policy as memory_policy
    from moe_memory.optim.decay import is_decayed as is_decayed
    from moe_memory.optim.optimizer import Optimizer as Optimizer
    from moe_memory.optim.schedule import learning_rate as learning_rate
    from moe_memory.precision import compute_dtypes as compute_dtypes
    from moe_memory.recompute import (
        KEPT_UNITS as KEPT_UNITS,
        ActivationPolicy as ActivationPolicy,
        LayerUnits as LayerUnits,
        Replay as Replay,
        activation_policy as activation_policy,
        run_unit as run_unit,
    )

# Public name to module. Loaded on first use, so that configuration and the command line work without importing torch.
# No name is that of a module: `initialise` would be the function or the module, whichever was asked for first.
_MODULE_OF = {
    "activation_policy": "recompute",
    "ActivationPolicy": "recompute",
    "build_engine": "data_parallel",
    "clip_factor": "data_parallel.norm",
    "compute_dtypes": "precision",
    "constant": "initialise",
    "CopyEngine": "copies",
    "CudaCopies": "copies",
    "DataParallelEngine": "data_parallel.engine",
    "draw": "initialise",
    "FakeCopies": "copies",
    "Fsdp": "data_parallel.fsdp",
    "InitRule": "initialise",
    "is_decayed": "optim.decay",
    "KEPT_UNITS": "recompute",
    "LayerUnits": "recompute",
    "learning_rate": "optim.schedule",
    "LiveBytes": "measure",
    "MemoryAccount": "measure",
    "MemoryConfig": "config",
    "MoeMemoryError": "errors",
    "memory_policy": "offload",
    "normal": "initialise",
    "Offload": "offload",
    "OffloadRules": "offload",
    "ones": "initialise",
    "OptimConfig": "config",
    "Optimizer": "optim.optimizer",
    "PeakMemory": "measure",
    "Replay": "recompute",
    "run_unit": "recompute",
    "SavedBytes": "measure",
    "ShardedEngine": "data_parallel",
    "StateTensor": "data_parallel.engine",
    "Zero1": "data_parallel",
    "zeros": "initialise",
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
