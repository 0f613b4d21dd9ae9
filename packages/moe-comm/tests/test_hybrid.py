"""The dispatcher of two levels: the conformance kit over nodes and ranks per node, and what only it does."""

import weakref

import pytest
import torch
import torch.distributed as dist

from moe_comm import HybridConfig, MoeCommError, build_dispatcher, combine, dispatch, hybrid, journey
from moe_comm.testing import DispatcherConformance
from moe_comm.testing.harness import split_groups
from moe_kernels import Routing
from moe_parallel import AxisGroups, Pending
from moe_parallel.testing import run_threads


class TestHybridConforms(DispatcherConformance):
    plugin = hybrid.PLUGIN
    config = HybridConfig()
    worlds = (4, (2, 2))
    large_worlds = (2, 6, 12, 16)
    roundings = 3  # sums of a rank, of a node, of all nodes
    nodes = 2


class TestHybridWithLanesConforms(DispatcherConformance):
    plugin = hybrid.PLUGIN
    config = HybridConfig(lanes=3)
    worlds = (3,)
    large_worlds = (6, (2, 3))
    roundings = 3
    nodes = 3


class TestHybridWithRailAllGatherConforms(DispatcherConformance):
    plugin = hybrid.PLUGIN
    config = HybridConfig(rail="allgather", lanes=2)
    worlds = ((2, 2),)
    large_worlds = (2, 4, 6)
    roundings = 3
    nodes = 2


class TestHybridOfOneNodeConforms(DispatcherConformance):
    plugin = hybrid.PLUGIN
    config = HybridConfig()
    worlds = (1,)
    large_worlds = ((2, 1),)


def build(rank, groups, nodes, num_experts, **options):
    return build_dispatcher(HybridConfig(**options), split_groups(rank, groups, 1, nodes), num_experts)


def plan_of(dispatcher, ids_TK, num_experts):
    probs_TK = torch.ones(ids_TK.shape)
    return dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=num_experts)), probs_TK


def test_a_token_crosses_the_network_once_for_a_node():
    """A token for all experts of the other node leaves in one row, which its rail makes two of, one for each rank.

    Row 31.
    """

    def on_rank(rank, groups):
        dispatcher = build(rank, groups, 2, 8)
        other = [4, 5, 6, 7] if rank < 2 else [0, 1, 2, 3]
        plan, probs_TK = plan_of(dispatcher, torch.tensor([other, [-1] * 4]), 8)
        parcel = dispatcher.prepare(plan, torch.ones(2, 3), probs_TK)
        rail, node = plan.journey.lanes[0]
        received = dispatcher.exchange(plan, parcel).wait()
        return len(parcel.rows), rail.send_rows, node.send_rows, len(received.rows), plan.num_rows

    first, second = ((1, (0, 1), (1, 1), 2, 4), (1, (1, 0), (1, 1), 2, 4))
    assert run_threads(4, on_rank) == [first, first, second, second]


def test_sums_of_a_node_are_made_before_they_leave_it():
    """What returns over the network is one row for each token that came, not one for each rank or expert."""

    def on_rank(rank, groups):
        dispatcher = build(rank, groups, 2, 8)
        plan, probs_TK = plan_of(dispatcher, torch.arange(8).view(1, 8), 8)
        sent = dispatch(dispatcher, plan, torch.full((1, 2), 1.0 + rank), probs_TK)
        back = dispatcher.exchange_return(plan, dispatcher.prepare_return(plan, sent.rows_RD)).wait()
        assert dispatcher.merge(plan, back).tolist() == [[8.0 * (1 + rank)] * 2]
        return back.rows.tolist()

    assert run_threads(4, on_rank) == [[[4.0 * (1 + rank)] * 2] * 2 for rank in range(4)]


def test_the_second_hop_of_a_lane_starts_as_the_wait_goes_on():
    def on_rank(rank, groups):
        dispatcher = build(rank, groups, 2, 4, lanes=2)
        plan, probs_TK = plan_of(dispatcher, torch.tensor([[0], [3], [1]]), 4)
        pending = dispatcher.exchange(plan, dispatcher.prepare(plan, torch.ones(3, 2), probs_TK))
        before = pending.done()
        pending.wait()
        return before, pending.done()

    assert run_threads(4, on_rank) == [(False, True)] * 4


@pytest.mark.parametrize("tokens", [0, 1, 2, 7])
def test_more_lanes_than_tokens(tokens):
    def on_rank(rank, groups):
        dispatcher = build(rank, groups, 2, 4, lanes=5)
        ids_TK = torch.arange(tokens * 2).view(tokens, 2) % 4
        plan, probs_TK = plan_of(dispatcher, ids_TK, 4)
        x_TD = torch.randn(tokens, 3, dtype=torch.float64)
        assert torch.equal(combine(dispatcher, plan, dispatch(dispatcher, plan, x_TD, probs_TK).rows_RD), 2 * x_TD)

    run_threads(4, on_rank)


def test_nodes_that_are_not_known_are_refused():
    """Row 19."""

    def on_rank(rank, groups):
        with pytest.raises(MoeCommError, match=r"ep_inner \(1\) and ep_outer \(1\) do not make up ep = 4"):
            build_dispatcher(HybridConfig(), groups, 8)

    run_threads(4, on_rank)


def test_row_19_nodes_that_are_not_neighbours_are_refused():
    """Experts lie in the order of `ep`, so that another cut would bring rows to the experts of somebody else."""

    def on_rank(rank, groups):
        world = groups.group("world")
        striped = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        axes = {"world": world, ("etp", "ep"): world, "ep": world}
        lame = AxisGroups(axes | {"ep_inner": striped[rank % 2], "ep_outer": halves[rank // 2]})
        with pytest.raises(MoeCommError, match=r"ep_inner must have the ranks \[(0, 1|2, 3)\] here, not \[(0|1), "):
            build_dispatcher(HybridConfig(), lame, 8)
        lame = AxisGroups(axes | {"ep_inner": halves[rank // 2], "ep_outer": halves[rank // 2]})
        with pytest.raises(MoeCommError, match=r"ep_outer must have the ranks \[(0, 2|1, 3)\] here"):
            build_dispatcher(HybridConfig(), lame, 8)

    run_threads(4, on_rank)


@pytest.mark.parametrize("lanes", [1, 3])
def test_what_arrived_is_gone_when_the_next_hop_begins(lanes):
    """Rows are copied or added up, and dropped before room is made for what the next hop brings."""
    arrived, begun = [], []

    def flight():
        rows = torch.ones(2, 3)
        arrived.append(weakref.ref(rows))
        return Pending.completed(journey.Freight(rows))

    def turn(lane, depth, parcel):
        return journey.Freight(parcel.rows + 10 * lane + depth)

    def start(lane, depth, at_hand):
        begun.append((lane, depth, arrived[len(begun)]() is None, at_hand.rows[0, 0].item()))
        return flight()

    pending = journey._in_turn(
        journey.Freight(torch.zeros(1)), [flight() for _ in range(lanes)], range(1, 3), turn, start
    )
    assert pending.wait().rows.shape == (2 * lanes, 3)
    assert begun == [(lane, depth, True, 1 + 10 * lane + depth) for depth in (1, 2) for lane in range(lanes)]


def test_a_number_of_lanes_that_is_none_is_refused():
    with pytest.raises(MoeCommError, match=r"comm\.lanes = 0"):
        build_dispatcher(HybridConfig(lanes=0), AxisGroups(), 4)


def test_rows_can_return_only_after_a_dispatch():
    def on_rank(rank, groups):
        dispatcher = build(rank, groups, 2, 4)
        plan, _ = plan_of(dispatcher, torch.tensor([[0]]), 4)
        with pytest.raises(MoeCommError, match="only after a dispatch with the same plan"):
            dispatcher.prepare_return(plan, torch.ones(plan.num_rows, 2))

    run_threads(4, on_rank)
