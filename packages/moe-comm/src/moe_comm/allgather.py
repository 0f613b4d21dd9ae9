"""`allgather`: every rank gets all tokens and keeps those of its experts; their sums return to each rank.

The dispatcher of two levels with every rank a node of its own, whose tokens go to all. It asks nothing but the number
of tokens, and pays for tokens that a rank has no use for: a choice for few ranks, or for many choices per token.
"""

from moe_comm.config import AllGatherConfig
from moe_comm.dispatcher import DispatcherPlugin
from moe_comm.two_level import TwoLevelDispatcher
from moe_comm.way import Level
from moe_parallel import Groups


def _build(config: AllGatherConfig, groups: Groups, num_experts: int) -> TwoLevelDispatcher:
    return TwoLevelDispatcher(
        groups,
        num_experts,
        rail=Level.of(groups, "ep", "dispatch", "combine"),
        node=Level.alone(),
        copies_to_all=True,
    )


PLUGIN = DispatcherPlugin(
    name="allgather", interface_version=1, config=AllGatherConfig, available=lambda: None, build=_build
)
