"""`comm.kind = "auto"`: the dispatcher that the model of bytes and latency expects to be fastest on this layout."""

import logging
from typing import Any

from moe_comm.config import AllGatherConfig, AllToAllConfig, AutoConfig, HybridConfig, LocalConfig
from moe_comm.cost import LayerSize, LinkSpeeds, cheapest
from moe_comm.dispatcher import DispatcherPlugin, TokenDispatcher
from moe_comm.registry import build_dispatcher
from moe_comm.volume import Algorithm, RandomRouting
from moe_parallel import Groups

logger = logging.getLogger(__name__)

Chosen = LocalConfig | AllToAllConfig | AllGatherConfig | HybridConfig

# The simplest first: of two that are equally fast it is taken.
_CONFIG_OF: dict[Algorithm, Chosen] = {
    "alltoall_per_rank": AllToAllConfig(),
    "allgather": AllGatherConfig(),
    "hybrid": HybridConfig(),
    "hybrid_rail_allgather": HybridConfig(rail="allgather"),
}


def choose(config: AutoConfig, groups: Groups, num_experts: int) -> tuple[Chosen, str]:
    """The options of the dispatcher to take, and why, as a clause. Every rank of a block chooses the same."""
    world, per_node, etp = groups.size("ep"), groups.size("ep_inner"), groups.size("etp")
    if world == etp == 1:
        return LocalConfig(), "one rank has all experts whole"
    # Without a cut of the ranks into nodes they are taken for one node.
    is_cut = per_node * groups.size("ep_outer") == world and groups.size("ep_outer") > 1
    per_node = per_node if is_cut else world
    if config.layer is None:
        chosen = HybridConfig() if is_cut and per_node > 1 else AllToAllConfig()
        return chosen, f"ep = {world} ranks are on {world // per_node} nodes, and the sizes of the layer are not known"
    layer = config.layer
    size = LayerSize(
        routing=RandomRouting(
            num_experts=num_experts, top_k=layer.top_k, groups=layer.groups, chosen_groups=layer.chosen_groups
        ),
        world=world,
        ranks_per_node=per_node,
        etp=etp,
        tokens=layer.tokens,
        hidden=layer.hidden,
        itemsize=layer.itemsize,
        probability_itemsize=max(4, layer.itemsize),
        fixed=config.rank_capacity_factor is not None,
    )
    speeds = LinkSpeeds(
        network_gb_per_s=config.network_gb_per_s,
        nvlink_gb_per_s=config.nvlink_gb_per_s,
        collective_us=config.collective_us,
    )
    among = [algorithm for algorithm in _CONFIG_OF if is_cut or not algorithm.startswith("hybrid")]
    ranking = cheapest(size, speeds, among=among)
    return _CONFIG_OF[ranking.best.algorithm], ranking.reason


def _build(config: AutoConfig, groups: Groups, num_experts: int) -> TokenDispatcher[Any]:
    chosen, reason = choose(config, groups, num_experts)
    dispatcher = build_dispatcher(chosen, groups, num_experts)
    logger.info("dispatcher: %s, because %s", _words(chosen), reason)
    return dispatcher


def _words(chosen: Chosen) -> str:
    """The kind and what is not as it is by default."""
    default = vars(type(chosen)())
    return " ".join([chosen.kind, *(f"{key}={value}" for key, value in vars(chosen).items() if value != default[key])])


PLUGIN = DispatcherPlugin(name="auto", interface_version=1, config=AutoConfig, available=lambda: None, build=_build)
