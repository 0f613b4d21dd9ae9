"""Thousands of random cases over all dispatchers, up to 16 ranks; the kit has two of each world in every run."""

import pytest

from moe_comm import AllGatherConfig, AllToAllConfig, HybridConfig, LocalConfig, allgather, alltoall, hybrid, local
from moe_comm.testing import DispatcherConformance
from moe_comm.testing.cases import block

KITS = {
    "local": (local.PLUGIN, LocalConfig(), 1),
    "alltoall": (alltoall.PLUGIN, AllToAllConfig(), 1),
    "per_expert": (alltoall.PLUGIN, AllToAllConfig(row="per_expert"), 1),
    "allgather": (allgather.PLUGIN, AllGatherConfig(), 1),
    "hybrid": (hybrid.PLUGIN, HybridConfig(), 2),
    "hybrid lanes": (hybrid.PLUGIN, HybridConfig(lanes=2), 3),
    "rail allgather": (hybrid.PLUGIN, HybridConfig(rail="allgather", lanes=3), 2),
}

# Ranks, or (etp, ep), and cases.
COUNTS = {1: 60, 2: 160, (2, 1): 60, 3: 120, 4: 60, (2, 2): 40, (2, 3): 12, 6: 20, 12: 4, 16: 2}


def fits(nodes, world):
    """Whether so many nodes divide the ranks, or there is one."""
    ranks = block(world)[1]
    return ranks % nodes == 0 or ranks == 1


RUNS = [
    (name, world)
    for name, (_, _, nodes) in KITS.items()
    for world in COUNTS
    if (world == 1 if name == "local" else fits(nodes, world))
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "world"), RUNS, ids=str)
def test_random_cases(name, world):
    plugin, config, nodes = KITS[name]
    members = {"plugin": plugin, "config": config, "worlds": (world,), "nodes": 1 if block(world)[1] == 1 else nodes}
    kit = type("Kit", (DispatcherConformance,), members)()
    kit.sweep(world, COUNTS[world], first=2)


def test_the_sweep_has_thousands_of_cases():
    assert sum(COUNTS[world] for _, world in RUNS) > 2000
    assert {3, 6, 12, 16} <= {world for _, world in RUNS}
