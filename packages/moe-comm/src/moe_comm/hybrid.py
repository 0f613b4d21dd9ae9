"""`hybrid`: Hybrid-EP over collectives: one copy of a token to a node, forwarding inside it, sums before leaving it.

A token crosses the network once for every node that has an expert of it, from its rank to that at the same place of the
other node (the rail group), which sends it on to the ranks of its node (the node group). Back, a rank adds up what its
experts answered, the rank of the rail adds up what its node answered, and one row per node returns.
"""

import torch.distributed as dist

from moe_comm.config import HybridConfig
from moe_comm.dispatcher import DispatcherPlugin
from moe_comm.errors import MoeCommError
from moe_comm.two_level import TwoLevelDispatcher
from moe_comm.way import Level
from moe_parallel import Groups


def _build(config: HybridConfig, groups: Groups, num_experts: int) -> TwoLevelDispatcher:
    for problem in config.problems():
        raise MoeCommError(str(problem))
    rail = Level.of(groups, "ep_outer", "dispatch_rail", "combine_rail")
    node = Level.of(groups, "ep_inner", "dispatch_node", "combine_node")
    ep = groups.size("ep")
    if rail.size * node.size != ep:
        raise MoeCommError(
            f"dispatcher 'hybrid' needs to know the ranks of a node: the axes ep_inner ({node.size}) and ep_outer "
            f"({rail.size}) do not make up ep = {ep}; a FoldedMesh with ep_inner has both"
        )
    _refuse_other_places(groups, rail, node)
    return TwoLevelDispatcher(
        groups, num_experts, rail=rail, node=node, copies_to_all=config.rail == "allgather", lanes=config.lanes
    )


def _refuse_other_places(groups: Groups, rail: Level, node: Level) -> None:
    """Raise unless nodes are neighbours on `ep` and rails have one place of every node, as experts are laid out."""
    group = groups.group("ep")
    if group is None:
        return
    everyone, place = dist.get_process_group_ranks(group), groups.rank("ep")
    first = place - place % node.size
    neighbours, counterparts = everyone[first : first + node.size], everyone[place % node.size :: node.size]
    for axis, level, wanted in (("ep_inner", node, neighbours), ("ep_outer", rail, counterparts)):
        found = wanted if level.group is None else dist.get_process_group_ranks(level.group)
        if found != wanted:
            raise MoeCommError(
                f"dispatcher 'hybrid' takes neighbours on ep = {everyone} for a node: {axis} must have the ranks "
                f"{wanted} here, not {found}; a FoldedMesh with ep_inner has them"
            )


PLUGIN = DispatcherPlugin(name="hybrid", interface_version=1, config=HybridConfig, available=lambda: None, build=_build)
