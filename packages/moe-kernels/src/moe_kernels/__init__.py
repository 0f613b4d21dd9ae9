"""moe-kernels: the mathematics of a Mixture-of-Experts layer on one device."""

from importlib import import_module
from typing import TYPE_CHECKING

from moe_kernels._version import __version__ as __version__

if TYPE_CHECKING:
    from moe_kernels.config import KernelsConfig as KernelsConfig
    from moe_kernels.dtypes import internal_dtype as internal_dtype
    from moe_kernels.errors import MoeKernelsError as MoeKernelsError
    from moe_kernels.registry import (
        Installed as Installed,
    )
    from moe_kernels.registry import (
        PluginError as PluginError,
    )
    from moe_kernels.registry import (
        Registry as Registry,
    )
    from moe_kernels.routing import Routing as Routing

# Public name to module. Loaded on first use, so that configuration and the command line work without importing torch.
_MODULE_OF = {
    "Installed": "registry",
    "internal_dtype": "dtypes",
    "KernelsConfig": "config",
    "MoeKernelsError": "errors",
    "PluginError": "registry",
    "Registry": "registry",
    "Routing": "routing",
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
