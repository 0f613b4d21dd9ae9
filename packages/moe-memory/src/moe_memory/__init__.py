"""moe-memory: what lives where and when."""

from importlib import import_module
from typing import TYPE_CHECKING

from moe_memory._version import __version__ as __version__

if TYPE_CHECKING:
    from moe_memory.data_parallel.engine import (
        DataParallelEngine as DataParallelEngine,
    )
    from moe_memory.data_parallel.engine import (
        StateTensor as StateTensor,
    )
    from moe_memory.errors import MoeMemoryError as MoeMemoryError

# Public name to module. Loaded on first use, so that configuration and the command line work without importing torch.
_MODULE_OF = {
    "DataParallelEngine": "data_parallel.engine",
    "MoeMemoryError": "errors",
    "StateTensor": "data_parallel.engine",
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
