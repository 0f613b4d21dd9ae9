"""`comm.kind = "auto"`: the first dispatcher of an ordered list that can serve this layout."""

import logging
from typing import Any

from moe_comm.config import AllToAllConfig, AutoConfig, LocalConfig
from moe_comm.dispatcher import DispatcherPlugin, TokenDispatcher
from moe_comm.errors import MoeCommError
from moe_comm.registry import build_dispatcher
from moe_kernels import PluginError
from moe_parallel import Groups

logger = logging.getLogger(__name__)

# Best first.
_ORDER = (LocalConfig(), AllToAllConfig())


def _build(config: AutoConfig, groups: Groups, num_experts: int) -> TokenDispatcher[Any]:
    refusals: list[str] = []
    for candidate in _ORDER:
        try:
            dispatcher = build_dispatcher(candidate, groups, num_experts)
        except (MoeCommError, PluginError) as error:
            refusals.append(str(error))
            continue
        because = f", because {'; '.join(refusals)}" if refusals else ""
        logger.info("dispatcher: %s%s", candidate.kind, because)
        return dispatcher
    raise MoeCommError(f"no dispatcher can serve this layout: {'; '.join(refusals)}")


PLUGIN = DispatcherPlugin(name="auto", interface_version=1, config=AutoConfig, available=lambda: None, build=_build)
