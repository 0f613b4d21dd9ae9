"""`DispatcherConformance`: the rules of the dispatcher seam as tests that any dispatcher can be put through.

    class TestAcme(DispatcherConformance):
        plugin = PLUGIN
        config = AcmeConfig()
        worlds = (1, 2, 3, 4, (2, 1), (2, 3))

Ranks are threads (`moe_parallel.testing.run_threads`) and tensors are on the CPU. Memory is poisoned: what nobody wrote
is NaN. Values are of order one and judged in float64, which the dispatcher must carry, so that a missing or halved term
cannot hide. Fixed sizes are put through the rules where they are supported, and must be refused where not.
"""

from dataclasses import is_dataclass

from moe_comm.dispatcher import DISPATCHER_INTERFACE_VERSION
from moe_comm.testing.cases import block
from moe_comm.testing.communication import CommunicationRules
from moe_comm.testing.refusals import RefusalRules
from moe_comm.testing.reuse import ReuseRules
from moe_comm.testing.rows import RowRules
from moe_comm.testing.static import StaticRules
from moe_comm.testing.sweep import SweepRules
from moe_comm.testing.values import ValueRules
from moe_comm.testing.verdict import require


class DispatcherConformance(
    RowRules, ValueRules, ReuseRules, StaticRules, SweepRules, CommunicationRules, RefusalRules
):
    """Subclass it, name the plug-in, and let pytest collect the subclass; or call the `test_*` methods.

    Attributes:
        plugin: the plug-in record.
        config: an instance of its config.
        worlds: numbers of expert-parallel ranks to run on; a pair (etp, ep) is a block of ranks with split experts.
        large_worlds: those where one rule is enough, `test_random_cases`.
        roundings: how often a combined sum is rounded to the row dtype; 1 where all of it is added up in the internal
            dtype, more for dispatchers that send partial sums in the dtype of the rows.
        nodes: equal parts of the ranks that are neighbours, on the axes `ep_inner` and `ep_outer` of the groups.
    """

    def test_plugin_record(self) -> None:
        """The record names itself, its config selects it, and it can run here."""
        plugin = self.plugin
        require(plugin.interface_version == DISPATCHER_INTERFACE_VERSION, "written for another interface version")
        require(is_dataclass(plugin.config), "the config is a dataclass")
        require(isinstance(self.config, plugin.config), "the config is an instance of the plug-in's config")
        require(self.config.kind == plugin.name, "the config's `kind` is the plug-in's name")
        require(plugin.config().kind == plugin.name, "the config's `kind` has the plug-in's name as default")
        require(plugin.available() is None, f"cannot run here: {plugin.available()}")

    def test_split_experts_are_tested_where_they_are_served(self) -> None:
        """A dispatcher that says it serves `etp` > 1 is put through it: `worlds` has a pair with as much."""
        served = self.capabilities(self.worlds[0]).largest_etp
        tested = max(block(world)[0] for world in (*self.worlds, *self.large_worlds))
        if served is None or served > 1:
            require(tested > 1, f"serves etp up to {served or 'any'}, but `worlds` has no pair (etp, ep) with etp > 1")
        else:
            require(tested == 1, f"`worlds` has etp = {tested}, but the dispatcher keeps whole experts")
