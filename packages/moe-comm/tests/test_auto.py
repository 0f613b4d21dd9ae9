"""`auto` takes the dispatcher that the model of bytes and latency expects to be fastest, and says why."""

import logging
from dataclasses import replace

import pytest

from moe_comm.auto import choose
from moe_comm.config import AllToAllConfig, AutoConfig, HybridConfig, LayerConfig
from moe_comm.local import LocalDispatcher
from moe_comm.registry import build_dispatcher
from moe_comm.testing.harness import split_groups
from moe_comm.two_level import TwoLevelDispatcher
from moe_parallel import AxisGroups, MoeParallelError
from moe_parallel.testing import run_threads

DEEPSEEK = LayerConfig(tokens=4096, hidden=7168, top_k=8, groups=8, chosen_groups=4)


class Sizes:
    """`Groups` of which only the sizes are asked for."""

    def __init__(self, **sizes):
        self.sizes = sizes

    def size(self, *axes):
        return self.sizes.get(axes[0], 1)


def chosen(config=None, num_experts=256, **sizes):
    return choose(config or AutoConfig(layer=DEEPSEEK), Sizes(**sizes), num_experts)


def test_one_rank_gets_the_local_dispatcher(caplog):
    with caplog.at_level(logging.INFO, "moe_comm"):
        assert isinstance(build_dispatcher(AutoConfig(), AxisGroups(), 6), LocalDispatcher)
    assert caplog.messages == ["dispatcher: local, because one rank has all experts whole"]


@pytest.mark.parametrize(("nodes", "words"), [(1, "alltoall"), (2, "hybrid")])
def test_several_ranks_get_what_suits_their_nodes_and_the_log_says_why(caplog, nodes, words):
    def on_rank(rank, groups):
        return build_dispatcher(AutoConfig(), split_groups(rank, groups, 1, nodes), 8)

    with caplog.at_level(logging.INFO, "moe_comm"):
        found = run_threads(4, on_rank)
    assert all(isinstance(dispatcher, TwoLevelDispatcher) for dispatcher in found)
    assert len(caplog.messages) == 4
    assert caplog.messages[0].startswith(f"dispatcher: {words}, because")
    assert f"because ep = 4 ranks are on {nodes} nodes, and the sizes of the layer are not known" in caplog.messages[0]


def test_the_sizes_of_the_layer_decide():
    """DeepSeek-V3 on 8 nodes of 8: two levels; the same on one node: straight; few tokens: what starts least."""
    config, reason = chosen(ep=64, ep_inner=8, ep_outer=8)
    assert config == HybridConfig()
    assert reason.startswith("hybrid takes")
    assert "MB over the network" in reason
    assert "next is" in reason
    assert chosen(ep=8, ep_inner=8)[0] == AllToAllConfig()
    few = AutoConfig(layer=LayerConfig(tokens=4, hidden=7168, top_k=8))
    assert chosen(few, ep=16, ep_inner=8, ep_outer=2)[0] == AllToAllConfig()


def test_without_a_cost_of_starting_the_bytes_decide():
    """Where every rank needs every token all ways cost the same, and the simplest is taken."""
    config, _ = chosen(AutoConfig(layer=LayerConfig(tokens=512, hidden=64, top_k=8)), num_experts=8, ep=4)
    assert config == AllToAllConfig()


def test_the_speeds_are_options():
    """A network as fast as the node makes one hop better than two."""
    fast = AutoConfig(layer=DEEPSEEK, network_gb_per_s=450.0)
    assert chosen(fast, ep=16, ep_inner=8, ep_outer=2)[0] == AllToAllConfig()
    assert chosen(ep=16, ep_inner=8, ep_outer=2)[0].kind == "hybrid"


def test_fixed_sizes_count_as_what_they_send():
    """One choice of 256 experts is seldom worth a hop; with rows for the worst case every token goes to every rank."""
    exact = AutoConfig(layer=LayerConfig(tokens=4096, hidden=7168, top_k=1))
    sizes = {"ep": 64, "ep_inner": 8, "ep_outer": 8}
    assert chosen(exact, **sizes)[0] == AllToAllConfig()
    config, reason = chosen(replace(exact, rank_capacity_factor=1.25), **sizes)
    assert config == HybridConfig()
    assert f"({7 * 4096 * (2 * 7168 * 2 + 8) / 1e6:.3g} MB over the network" in reason


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["network_gb_per_s", "nvlink_gb_per_s"])
def test_speeds_that_are_none_are_problems_of_the_section(key, value):
    (problem,) = AutoConfig(**{key: value}).problems()
    assert (problem.key, problem.rule) == (f"comm.{key}", "must be finite and above 0")


def test_a_start_that_takes_no_time_is_legal_and_one_that_takes_less_is_not():
    assert AutoConfig(collective_us=0.0).problems() == []
    assert [problem.key for problem in AutoConfig(collective_us=-1.0).problems()] == ["comm.collective_us"]


def test_ranks_without_a_cut_are_one_node():
    """Axes of a node that do not make up `ep` are none."""
    assert chosen(ep=16, ep_inner=1, ep_outer=1)[0] == AllToAllConfig()


def test_split_experts_are_more_than_one_rank():
    assert chosen(ep=1, etp=2)[0] == AllToAllConfig()


def test_groups_that_cannot_be_served_are_an_error_of_the_chosen_one():
    """What cannot be built is not replaced."""

    def on_rank(rank, groups):
        lame = AxisGroups({"etp": groups.group("world"), "ep": groups.group("world")})
        with pytest.raises(MoeParallelError, match="no process group was given"):
            build_dispatcher(AutoConfig(), lame, 6)

    run_threads(2, on_rank)
