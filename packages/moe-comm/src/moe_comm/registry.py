"""The installed dispatchers, and the one that a configuration names."""

from typing import Any, Protocol

from moe_comm.dispatcher import DISPATCHER_INTERFACE_VERSION, DispatcherPlugin, TokenDispatcher
from moe_comm.errors import MoeCommError
from moe_kernels import Registry
from moe_parallel import Groups

DISPATCHERS: Registry[DispatcherPlugin[Any]] = Registry(
    "moe_comm.dispatchers", "dispatcher", DispatcherPlugin, DISPATCHER_INTERFACE_VERSION
)


class DispatcherConfig(Protocol):
    """What every dispatcher's configuration has."""

    @property
    def kind(self) -> str: ...


def build_dispatcher(config: DispatcherConfig, groups: Groups, num_experts: int) -> TokenDispatcher[Any]:
    """Build the dispatcher that `config.kind` names; another is never taken in its place.

    Args:
        config: the options of one dispatcher, an instance of its plug-in's `config`.
        groups: process groups of this rank; the axes `ep` and `etp` are used.
        num_experts: experts over all ranks, a multiple of the size of `ep`.

    Raises:
        PluginError: no such dispatcher is installed (the message lists those that are), or it cannot run here.
        MoeCommError: the options are another dispatcher's, or a limit of the dispatcher is exceeded.
    """
    plugin = DISPATCHERS.get_available(config.kind)
    if not isinstance(config, plugin.config):
        raise MoeCommError(
            f"dispatcher {plugin.name!r} is configured by {plugin.config.__name__}, not by {type(config).__name__}"
        )
    ep = groups.size("ep")
    if num_experts < 1 or num_experts % ep:
        raise MoeCommError(f"{num_experts} experts cannot be spread evenly over ep = {ep} ranks")
    dispatcher = plugin.build(config, groups, num_experts)
    can = dispatcher.capabilities
    for axis, limit in (("ep", can.largest_ep), ("etp", can.largest_etp)):
        if limit is not None and groups.size(axis) > limit:
            raise MoeCommError(
                f"dispatcher {plugin.name!r} serves {axis} up to {limit}, but {axis} = {groups.size(axis)}; "
                f"choose another (comm.kind), or a smaller parallel.{axis}"
            )
    return dispatcher
