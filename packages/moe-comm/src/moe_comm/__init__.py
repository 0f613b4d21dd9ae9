"""moe-comm: tokens between ranks."""

from importlib import import_module
from typing import TYPE_CHECKING

from moe_comm._version import __version__ as __version__

if TYPE_CHECKING:
    from moe_comm.dispatcher import (
        Capabilities as Capabilities,
    )
    from moe_comm.dispatcher import (
        Dispatched as Dispatched,
    )
    from moe_comm.dispatcher import (
        DispatcherPlugin as DispatcherPlugin,
    )
    from moe_comm.dispatcher import (
        Parcel as Parcel,
    )
    from moe_comm.dispatcher import (
        Plan as Plan,
    )
    from moe_comm.dispatcher import (
        Sizing as Sizing,
    )
    from moe_comm.dispatcher import (
        TokenDispatcher as TokenDispatcher,
    )
    from moe_comm.dispatcher import (
        combine as combine,
    )
    from moe_comm.dispatcher import (
        dispatch as dispatch,
    )
    from moe_comm.errors import MoeCommError as MoeCommError

# Public name to module. Loaded on first use, so that configuration and the command line work without importing torch.
_MODULE_OF = {
    "Capabilities": "dispatcher",
    "combine": "dispatcher",
    "dispatch": "dispatcher",
    "Dispatched": "dispatcher",
    "DispatcherPlugin": "dispatcher",
    "MoeCommError": "errors",
    "Parcel": "dispatcher",
    "Plan": "dispatcher",
    "Sizing": "dispatcher",
    "TokenDispatcher": "dispatcher",
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
