"""The all-to-all dispatcher: the conformance kit in both kinds of rows, and what may differ between ranks.

Ranks are threads here; `test_processes.py` has them on gloo.
"""

import threading
from dataclasses import replace

import pytest
import torch

from moe_comm import AllToAllConfig, MoeCommError, Sizing, alltoall, build_dispatcher, combine, dispatch
from moe_comm.testing import DispatcherConformance
from moe_comm.two_level import TwoLevelPlan
from moe_kernels import Routing
from moe_parallel import AxisGroups, all_to_all
from moe_parallel.testing import run_threads


class TestAllToAllConforms(DispatcherConformance):
    plugin = alltoall.PLUGIN
    config = AllToAllConfig()
    worlds = (1, 2, 3, (2, 2), (3, 1))
    large_worlds = (12, 16, (2, 3))
    roundings = 2  # sums of a rank, and of all ranks


class TestAllToAllOfChoicesConforms(DispatcherConformance):
    plugin = alltoall.PLUGIN
    config = AllToAllConfig(row="per_expert")
    worlds = (2, (2, 1))
    large_worlds = (3, (2, 3))


def build(groups, num_experts, row="per_rank"):
    return build_dispatcher(AllToAllConfig(row=row), groups, num_experts)


@pytest.mark.parametrize("row_multiple", [1, 8])
def test_r042_counts_are_those_of_the_ids_that_arrived(row_multiple):
    """Every row carries its expert's id, and rank r's rows its number: they arrive in blocks, expert by expert."""
    tokens, top_k, share = (5, 0, 9), 3, 4
    world, num_experts = len(tokens), share * len(tokens)

    def on_rank(rank, groups):
        ids_TK = torch.randint(-1, num_experts, (tokens[rank], 1), generator=torch.Generator().manual_seed(rank))
        ids_TK = ids_TK.expand(-1, top_k)
        x_TD = torch.stack((ids_TK[:, 0], torch.full((tokens[rank],), rank)), 1).double()
        dispatcher = build(groups, num_experts)
        probs_TK = torch.ones(tokens[rank], top_k, dtype=torch.float64)
        plan = dispatcher.plan(
            Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=num_experts), Sizing(row_multiple=row_multiple)
        )
        sent = dispatch(dispatcher, plan, x_TD, probs_TK)
        real_R = sent.probs_R > 0
        expert_R = torch.searchsorted(sent.offsets_E, torch.arange(plan.num_rows), right=True)
        assert torch.equal(sent.rows_RD[real_R, 0].long(), expert_R[real_R] + rank * share)
        assert torch.equal(torch.bincount(expert_R[real_R], minlength=share), sent.counts_E)
        order_R = expert_R[real_R] * world + sent.rows_RD[real_R, 1].long()
        assert torch.equal(order_R, order_R.sort().values), "inside an expert rows are in the order of their ranks"
        return int(real_R.sum())

    assert sum(run_threads(world, on_rank)) > 20


def test_r038_choices_of_nobody_are_not_sent():
    """Padding tokens (ids -1) take no row and come back as exactly zero. Row 42."""

    def on_rank(rank, groups):
        dispatcher = build(groups, 2)
        ids_TK = torch.tensor([[-1, -1], [0, 1], [-1, 1], [-1, -1]])
        x_TD, probs_TK = torch.randn(4, 3), torch.rand(4, 2)
        plan = dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=2))
        parcel = dispatcher.prepare(plan, x_TD, probs_TK)
        assert parcel.rows.shape == (3, 3)
        y_TD = combine(dispatcher, plan, dispatch(dispatcher, plan, x_TD, probs_TK).rows_RD)
        assert y_TD[[0, 3]].abs().max() == 0
        torch.testing.assert_close(y_TD[1:3], x_TD[1:3] * torch.tensor([[2.0], [1.0]]))
        return plan.num_rows

    assert run_threads(2, on_rank) == [2, 4]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("wrong", [-2, 6, 2**40, -(2**40)])
def test_an_id_out_of_range_is_named_on_every_rank(world, wrong):
    culprit = world - 1

    def on_rank(rank, groups):
        ids_TK = torch.tensor([[0, 1]] * (3 if rank == culprit else 0), dtype=torch.int64).view(-1, 2)
        if rank == culprit:
            ids_TK[1, 0] = wrong
        routing = Routing(ids_TK=ids_TK, probs_TK=torch.rand(len(ids_TK), 2), num_experts=6)
        dispatcher = build(groups, 6)
        where = "" if world == 1 else f"rank {culprit}: "
        with pytest.raises(MoeCommError, match=rf"^{where}expert id {wrong} is out of range; .* 0 to 5$"):
            dispatcher.plan(routing)
        # Nobody is left behind in a collective: the next plan works.
        return dispatcher.plan(replace(routing, ids_TK=ids_TK.clamp(0, 5))).num_rows

    assert sum(run_threads(world, on_rank)) == 6


def test_every_faulty_rank_is_named():
    def on_rank(rank, groups):
        routing = Routing(ids_TK=torch.tensor([[6 + rank]]), probs_TK=torch.ones(1, 1), num_experts=8)
        words = r"^rank 2: expert id 8 is [^;]*; [^;]*; rank 3: expert id 9 is [^;]*; [^;]*$"
        with pytest.raises(MoeCommError, match=words):
            build(groups, 8).plan(routing)

    run_threads(4, on_rank)


def test_both_tensors_are_under_way_before_one_is_waited_for(monkeypatch):
    """In backward too; and nothing is waited for before the caller waits."""
    events = threading.local()

    class Watched:
        def __init__(self, pending):
            self.pending, self.is_over = pending, False

        def wait(self):
            if not self.is_over:
                events.seen.append("wait")
            self.is_over = True
            return self.pending.wait()

        def done(self):
            return False

    def watched(x, group, **splits):
        events.seen.append("issue")
        return Watched(all_to_all(x, group, **splits))

    monkeypatch.setattr("moe_comm.journey.all_to_all", watched)

    def on_rank(rank, groups):
        events.seen = []
        x_TD, probs_TK = torch.randn(3, 2, requires_grad=True), torch.rand(3, 1, requires_grad=True)
        dispatcher = build(groups, 2)
        plan = dispatcher.plan(Routing(ids_TK=torch.tensor([[0], [1], [1]]), probs_TK=probs_TK, num_experts=2))
        pending = dispatcher.exchange(plan, dispatcher.prepare(plan, x_TD, probs_TK))
        assert events.seen == ["issue", "issue"]
        assert not pending.done()
        received = pending.wait()
        assert events.seen[2:4] == ["wait", "wait"]
        del events.seen[:]
        (received.rows.sum() + received.probs.sum()).backward()
        assert events.seen == ["issue", "issue", "wait", "wait"]

    run_threads(2, on_rank)


def test_rows_of_another_plan_are_refused():
    dispatcher = build(AxisGroups(), 3)
    probs_TK = torch.ones(2, 1)
    plan = dispatcher.plan(Routing(ids_TK=torch.tensor([[2], [0]]), probs_TK=probs_TK, num_experts=3))
    assert isinstance(plan, TwoLevelPlan)
    with pytest.raises(MoeCommError, match="the plan has 2 rows"):
        dispatcher.prepare_return(plan, torch.ones(3, 2))
    with pytest.raises(MoeCommError, match="carries probabilities"):
        dispatcher.arrange(plan, dispatcher.prepare_return(plan, torch.ones(2, 2)))
