"""moe-comm: tokens between ranks."""

from importlib import import_module
from typing import TYPE_CHECKING

from moe_comm._version import __version__ as __version__

if TYPE_CHECKING:
    from moe_comm.checks import (
        check_most_tokens as check_most_tokens,
        check_routing as check_routing,
        check_tokens as check_tokens,
        id_out_of_range as id_out_of_range,
        refuse_overflow as refuse_overflow,
        words_for_id as words_for_id,
        wrong_ids as wrong_ids,
    )
    from moe_comm.config import (
        AllGatherConfig as AllGatherConfig,
        AllToAllConfig as AllToAllConfig,
        AutoConfig as AutoConfig,
        HybridConfig as HybridConfig,
        LocalConfig as LocalConfig,
    )
    from moe_comm.dispatcher import (
        DISPATCHER_INTERFACE_VERSION as DISPATCHER_INTERFACE_VERSION,
        EXACT as EXACT,
        Capabilities as Capabilities,
        Dispatched as Dispatched,
        DispatcherPlugin as DispatcherPlugin,
        Parcel as Parcel,
        Plan as Plan,
        Sizing as Sizing,
        TokenDispatcher as TokenDispatcher,
        combine as combine,
        dispatch as dispatch,
    )
    from moe_comm.errors import (
        MoeCommError as MoeCommError,
    )
    from moe_comm.registry import (
        DISPATCHERS as DISPATCHERS,
        build_dispatcher as build_dispatcher,
    )
    from moe_comm.traffic import (
        TrafficEntry as TrafficEntry,
        TrafficLedger as TrafficLedger,
        note_buffer as note_buffer,
        note_host_sync as note_host_sync,
        note_traffic as note_traffic,
        record_traffic as record_traffic,
    )

# Public name to module. Loaded on first use, so that configuration and the command line work without importing torch.
_MODULE_OF = {
    "AllGatherConfig": "config",
    "AllToAllConfig": "config",
    "AutoConfig": "config",
    "build_dispatcher": "registry",
    "Capabilities": "dispatcher",
    "check_most_tokens": "checks",
    "check_routing": "checks",
    "check_tokens": "checks",
    "combine": "dispatcher",
    "dispatch": "dispatcher",
    "Dispatched": "dispatcher",
    "DISPATCHER_INTERFACE_VERSION": "dispatcher",
    "DispatcherPlugin": "dispatcher",
    "DISPATCHERS": "registry",
    "EXACT": "dispatcher",
    "HybridConfig": "config",
    "id_out_of_range": "checks",
    "LocalConfig": "config",
    "MoeCommError": "errors",
    "note_buffer": "traffic",
    "note_host_sync": "traffic",
    "note_traffic": "traffic",
    "Parcel": "dispatcher",
    "Plan": "dispatcher",
    "record_traffic": "traffic",
    "refuse_overflow": "checks",
    "Sizing": "dispatcher",
    "TokenDispatcher": "dispatcher",
    "TrafficEntry": "traffic",
    "TrafficLedger": "traffic",
    "words_for_id": "checks",
    "wrong_ids": "checks",
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
