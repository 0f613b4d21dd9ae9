"""`alltoall`: tokens straight to the ranks of their experts, one copy for each rank, or one for each choice.

The dispatcher of two levels with all ranks in one node. Portable: gloo, NCCL and the threaded group of `run_threads`.
"""

from moe_comm.config import AllToAllConfig
from moe_comm.dispatcher import DispatcherPlugin
from moe_comm.two_level import TwoLevelDispatcher
from moe_comm.way import Level
from moe_parallel import Groups


def _build(config: AllToAllConfig, groups: Groups, num_experts: int) -> TwoLevelDispatcher:
    return TwoLevelDispatcher(
        groups,
        num_experts,
        rail=Level.alone(),
        node=Level.of(groups, "ep", "dispatch", "combine"),
        row_per_choice=config.row == "per_expert",
    )


PLUGIN = DispatcherPlugin(
    name="alltoall", interface_version=1, config=AllToAllConfig, available=lambda: None, build=_build
)
