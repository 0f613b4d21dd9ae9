"""R128: the kit fails dispatchers that are wrong in one place each. A kit that passes everything proves nothing."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from acme_dispatch import PLUGIN, AcmeConfig, AcmeDispatcher

from moe_comm import AllToAllConfig, Dispatched, HybridConfig, Parcel, alltoall, hybrid
from moe_comm.landing import Arrivals
from moe_comm.testing import DispatcherConformance
from moe_comm.two_level import TwoLevelDispatcher
from moe_comm.way import Level
from moe_parallel import AxisGroups, MoeParallelError, Pending


def reversal(plan):
    """Rows of each expert in reverse; padding stays where it is. Its own inverse."""
    order = list(range(plan.num_rows))
    start = 0
    for count, end in zip(plan.counts_E.tolist(), plan.offsets_E.tolist(), strict=True):
        order[start : start + count] = reversed(order[start : start + count])
        start = end
    return torch.tensor(order, dtype=torch.int64)


class ReversedRows(AcmeDispatcher):
    def arrange(self, plan, received):
        sent = super().arrange(plan, received)
        order = reversal(plan)
        return replace(sent, rows_RD=sent.rows_RD[order], probs_R=sent.probs_R[order])

    def prepare_return(self, plan, rows_RD):
        return super().prepare_return(plan, rows_RD[reversal(plan)])


class CommunicatesInPrepare(AcmeDispatcher):
    def prepare(self, plan, x_TD, probs_TK):
        dist.barrier(group=self.group)
        return super().prepare(plan, x_TD, probs_TK)


class BarrierInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, group):
        ctx.group = group
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        dist.barrier(group=ctx.group)
        return grad, None


class CommunicatesInBackwardOfMerge(AcmeDispatcher):
    def merge(self, plan, received):
        return BarrierInBackward.apply(super().merge(plan, received), self.group)


class NoChoiceIsExpertZero(AcmeDispatcher):
    def plan(self, routing, *sizing):
        return super().plan(replace(routing, ids_TK=routing.ids_TK.clamp(min=0)), *sizing)


class Halves(AcmeDispatcher):
    def merge(self, plan, received):
        return super().merge(plan, received) / 2


class Zeros(AcmeDispatcher):
    def merge(self, plan, received):
        return super().merge(plan, received) * 0


class ExpertsInReverse(AcmeDispatcher):
    def plan(self, routing, *sizing):
        ids = routing.ids_TK
        return super().plan(replace(routing, ids_TK=torch.where(ids < 0, ids, self.num_experts - 1 - ids)), *sizing)


class SkipsTheExchangeWhenEmpty(AcmeDispatcher):
    def exchange(self, plan, parcel):
        if plan.num_tokens:
            return super().exchange(plan, parcel)
        # Attached to the graph, so that nothing but the missing call is wrong.
        rows = parcel.rows.new_zeros(self.world * plan.most_tokens, parcel.rows.shape[1]) + parcel.rows.sum() * 0
        probs = parcel.probs.new_zeros(len(rows), plan.num_choices) + parcel.probs.sum() * 0
        return Pending.completed(Parcel(rows=rows, probs=probs))


class LosesTheGraphWhenEmpty(AcmeDispatcher):
    def merge(self, plan, received):
        y_TD = super().merge(plan, received)
        return y_TD if plan.num_tokens else y_TD.detach()


class GathersProbabilitiesWithoutAutograd(AcmeDispatcher):
    def prepare(self, plan, x_TD, probs_TK):
        return super().prepare(plan, x_TD, probs_TK.detach())


class LeavesPaddingUnwritten(AcmeDispatcher):
    def arrange(self, plan, received):
        sent = super().arrange(plan, received)
        rows_RD = torch.empty_like(sent.rows_RD)
        real = (plan.map.choice_R >= 0).unsqueeze(1)
        return replace(sent, rows_RD=torch.where(real, sent.rows_RD, rows_RD))


class CountsPadding(AcmeDispatcher):
    def arrange(self, plan, received):
        sent = super().arrange(plan, received)
        counts_E = sent.offsets_E.diff(prepend=sent.offsets_E.new_zeros(1)).long()
        return replace(sent, counts_E=counts_E)


class RemembersTheLastPlan(AcmeDispatcher):
    def plan(self, routing, *sizing):
        self.last = super().plan(routing, *sizing)
        return self.last

    def arrange(self, plan, received):
        order = self.last if self.last.num_rows == plan.num_rows else plan
        sent = super().arrange(order, received)
        return replace(sent, counts_E=plan.counts_E, offsets_E=plan.offsets_E, plan=plan)


class DriftsFromCallToCall(AcmeDispatcher):
    calls = 0

    def merge(self, plan, received):
        self.calls += 1
        return super().merge(plan, received) * (1 + 1e-15 * self.calls)


class SumsInTheDtypeOfTheRows(AcmeDispatcher):
    def prepare_return(self, plan, rows_RD):
        tokens = self.world * plan.most_tokens
        total = rows_RD.new_zeros(tokens, rows_RD.shape[1])
        rows_RD = torch.cat([rows_RD, rows_RD.new_zeros(1, rows_RD.shape[1])])  # row -1 is "no row"
        for choice in range(plan.num_choices):
            total = total + rows_RD[plan.map.row_TK[:, choice]]
        return Parcel(rows=total)


class KeepsABadIdToItself(AcmeDispatcher):
    """The rank that has the bad id raises at once; the others wait for it."""

    def plan(self, routing, *sizing):
        if routing.ids_TK.numel() and int(routing.ids_TK.max()) >= routing.num_experts:
            return super().plan(replace(routing, num_experts=0), *sizing)
        return super().plan(routing, *sizing)


class ChecksNothing(AcmeDispatcher):
    def plan(self, routing, *sizing):
        ids_TK = routing.ids_TK.long().view(routing.ids_TK.shape[0], -1).clamp(-1, self.num_experts - 1)
        good = replace(routing, ids_TK=ids_TK, probs_TK=torch.ones(ids_TK.shape), num_experts=self.num_experts)
        return super().plan(good)


class ReturnsRowsAtOnce(AcmeDispatcher):
    def exchange(self, plan, parcel):
        received = super().exchange(plan, parcel).wait()
        return type("Ready", (), {"wait": lambda self: received})()


def kit(dispatcher, world):
    def build(config, groups, num_experts):
        return dispatcher(groups.group("ep"), groups.rank("ep"), groups.size("ep"), num_experts)

    members = {"plugin": replace(PLUGIN, build=build), "config": AcmeConfig(), "worlds": (world,), "roundings": 2}
    return type("Kit", (DispatcherConformance,), members)()


@pytest.mark.parametrize(
    ("dispatcher", "rule", "message"),
    [
        (ReversedRows, "test_row_order", "rows: values differ"),
        (CommunicatesInPrepare, "test_only_exchanges_communicate", "prepare communicates"),
        (CommunicatesInBackwardOfMerge, "test_only_exchanges_communicate", "the backward of merge communicates"),
        (NoChoiceIsExpertZero, "test_conservation", "counts"),
        (NoChoiceIsExpertZero, "test_identity", "off by"),
        (NoChoiceIsExpertZero, "test_dense_reference", "output: off by"),
        (Halves, "test_identity", "off by"),
        (Halves, "test_dense_reference", "output: off by"),
        (Halves, "test_r042_every_row_meets_its_expert", "off by"),
        (Halves, "test_dispatch_and_combine_are_adjoint", "backward of"),
        (Halves, "test_dtypes_and_sizes", "rounded more than 2 times"),
        (Zeros, "test_identity", "off by"),
        (Zeros, "test_dense_reference", "output: off by"),
        (ExpertsInReverse, "test_r042_every_row_meets_its_expert", "off by"),
        (ExpertsInReverse, "test_dense_reference", "output: off by"),
        (ExpertsInReverse, "test_conservation", "counts|not the tokens that chose it"),
        (SkipsTheExchangeWhenEmpty, "test_dense_reference", "ranks disagree on collective"),
        (SkipsTheExchangeWhenEmpty, "test_only_exchanges_communicate", "ranks disagree on collective"),
        (LosesTheGraphWhenEmpty, "test_dense_reference", "cut off from the graph"),
        (GathersProbabilitiesWithoutAutograd, "test_dense_reference", "probabilities of rank . have no gradient"),
        (GathersProbabilitiesWithoutAutograd, "test_dtypes_and_sizes", "probabilities lost their gradient"),
        (LeavesPaddingUnwritten, "test_row_order", "multiple 4: rows: values differ"),
        (CountsPadding, "test_row_order", "multiple 4: counts without padding"),
        (RemembersTheLastPlan, "test_interleaved_plans", "of two"),
        (DriftsFromCallToCall, "test_determinism", "the second run"),
        (DriftsFromCallToCall, "test_plan_reuse", "the second use of a plan"),
        (SumsInTheDtypeOfTheRows, "test_dtypes_and_sizes", "rounded more than 2 times"),
        (KeepsABadIdToItself, "test_an_id_out_of_range_is_refused_on_every_rank", "can never complete"),
        (ChecksNothing, "test_an_id_out_of_range_is_refused_on_every_rank", "expert id -2: accepted"),
        (ChecksNothing, "test_malformed_routing_is_refused_before_any_collective", "accepted"),
        (ReturnsRowsAtOnce, "test_overlapped_exchange", "not a Pending"),
        (ReversedRows, "test_random_cases", "rows: values differ"),
        (Halves, "test_random_cases", "off by|values differ"),
        (ExpertsInReverse, "test_random_cases", "off by|values differ|shape"),
        (DriftsFromCallToCall, "test_random_cases", "the second use of a plan|a second plan"),
    ],
)
def test_r128_a_fault_is_caught(dispatcher, rule, message):
    with pytest.raises((AssertionError, MoeParallelError), match=message):
        getattr(kit(dispatcher, 2), rule)(2)


def own_rows(plan, dispatcher):
    """Which rows that arrived this rank had before the ranks that share its experts gave it theirs."""
    hop = plan.journey.lanes[0][-1]
    begin = sum(hop.receive_rows[: dispatcher._way.sharers.rank])
    row_C = torch.arange(hop.rows_arriving)
    return (row_C >= begin) & (row_C < begin + hop.send_rows[0])


class ForgetsTheSumOverTheSharers(TwoLevelDispatcher):
    """Brings home this rank's part of the sum alone."""

    def prepare_return(self, plan, rows_RD):
        return Parcel(rows=super().prepare_return(plan, rows_RD).rows * own_rows(plan, self)[:, None])


class SumsProbabilityGradientsOfItsOwnExpertsAlone(TwoLevelDispatcher):
    """Probabilities of the other sharers' rows arrive without their way back."""

    def exchange(self, plan, parcel):
        received = super().exchange(plan, parcel).wait()
        probs = torch.where(own_rows(plan, self)[:, None], received.probs, received.probs.detach())
        return Pending.completed(Parcel(rows=received.rows, probs=probs))


class AveragesTheSharers(TwoLevelDispatcher):
    def merge(self, plan, received):
        return super().merge(plan, received) / self._way.sharers.size


class SharesNothing(TwoLevelDispatcher):
    """Each of the ranks that share an expert computes the rows of its own shard alone."""

    def __init__(self, groups, num_experts, **levels):
        super().__init__(AxisGroups({"ep": groups.group("ep")}), num_experts, **levels)


def split_kit(dispatcher, world=(2, 2)):
    def build(config, groups, num_experts):
        node = Level.of(groups, "ep", "dispatch", "combine")
        return dispatcher(groups, num_experts, rail=Level.alone(), node=node)

    members = {"plugin": replace(alltoall.PLUGIN, build=build), "config": AllToAllConfig(), "worlds": (world,)}
    return type("Kit", (DispatcherConformance,), {**members, "roundings": 2})()


@pytest.mark.parametrize(
    ("dispatcher", "rule", "message"),
    [
        (ForgetsTheSumOverTheSharers, "test_identity", "off by"),
        (ForgetsTheSumOverTheSharers, "test_dense_reference", "output: off by"),
        (ForgetsTheSumOverTheSharers, "test_r042_every_row_meets_its_expert", "off by"),
        (ForgetsTheSumOverTheSharers, "test_dispatch_and_combine_are_adjoint", "backward of"),
        (SumsProbabilityGradientsOfItsOwnExpertsAlone, "test_dense_reference", "gradient of probabilities: off by"),
        (SumsProbabilityGradientsOfItsOwnExpertsAlone, "test_dtypes_and_sizes", "gradient of probabilities"),
        (AveragesTheSharers, "test_identity", "off by"),
        (AveragesTheSharers, "test_dispatch_and_combine_are_adjoint", "backward of"),
        (SharesNothing, "test_conservation", "counts"),
        (SharesNothing, "test_row_order", "counts without padding"),
        (SharesNothing, "test_dense_reference", "off by"),
    ],
)
def test_r128_a_fault_of_split_experts_is_caught(dispatcher, rule, message):
    with pytest.raises(AssertionError, match=message):
        getattr(split_kit(dispatcher), rule)((2, 2))


def test_r128_rows_ordered_by_sharer_before_place_are_caught(monkeypatch):
    """Every row is at its expert, but the ranks that share it are taken one after another."""
    monkeypatch.setattr(Arrivals, "order_of_sources", lambda self: None)
    kit = split_kit(TwoLevelDispatcher)
    kit.test_conservation((2, 2))
    kit.test_dense_reference((2, 2))
    with pytest.raises(AssertionError, match="rows: values differ"):
        kit.test_row_order((2, 2))


def test_r128_rows_in_the_order_of_lanes_are_caught(monkeypatch):
    """Rows of the second lane of a node come after those of the first lane of all nodes, and stay there."""
    monkeypatch.setattr(Arrivals, "order_of_sources", lambda self: None)
    members = {"plugin": hybrid.PLUGIN, "config": HybridConfig(lanes=2), "worlds": (2,), "roundings": 3, "nodes": 2}
    kit = type("Kit", (DispatcherConformance,), members)()
    kit.test_conservation(2)
    with pytest.raises(AssertionError, match="rows: values differ"):
        kit.test_row_order(2)


def test_r128_split_experts_that_are_served_must_be_tested():
    with pytest.raises(AssertionError, match=r"serves etp up to any, but `worlds` has no pair"):
        split_kit(TwoLevelDispatcher, 2).test_split_experts_are_tested_where_they_are_served()
    split_kit(TwoLevelDispatcher).test_split_experts_are_tested_where_they_are_served()
    with pytest.raises(AssertionError, match="`worlds` has etp = 2, but the dispatcher keeps whole experts"):
        kit(AcmeDispatcher, (2, 1)).test_split_experts_are_tested_where_they_are_served()


@pytest.mark.parametrize(
    ("plugin", "config", "message"),
    [
        (replace(PLUGIN, name="other"), AcmeConfig(), "the plug-in's name"),
        (replace(PLUGIN, interface_version=99), AcmeConfig(), "interface version"),
        (replace(PLUGIN, available=lambda: "no network"), AcmeConfig(), "no network"),
        (PLUGIN, object(), "instance of the plug-in's config"),
        (replace(PLUGIN, config=Dispatched), AcmeConfig(), "instance of the plug-in's config"),
    ],
)
def test_r128_a_wrong_record_is_caught(plugin, config, message):
    broken = type("Kit", (DispatcherConformance,), {"plugin": plugin, "config": config})()
    with pytest.raises(AssertionError, match=message):
        broken.test_plugin_record()


def test_conservation_alone_does_not_see_the_order():
    kit(ReversedRows, 2).test_conservation(2)
