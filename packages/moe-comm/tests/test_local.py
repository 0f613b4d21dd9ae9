"""The local dispatcher: the conformance kit, a case worked out by hand, and its limits."""

import pytest
import torch

from moe_comm import LocalConfig, MoeCommError, Sizing, combine, dispatch
from moe_comm.local import PLUGIN, LocalDispatcher, LocalPlan
from moe_comm.testing import DispatcherConformance
from moe_kernels import Routing
from moe_parallel import AxisGroups
from moe_parallel.testing import run_threads


class TestLocalConforms(DispatcherConformance):
    plugin = PLUGIN
    config = LocalConfig()
    worlds = (1,)


IDS_TK = torch.tensor([[2, 0], [-1, 2], [0, -1]])
PROBS_TK = torch.tensor([[0.5, 0.25], [9.0, 2.0], [4.0, 9.0]])
X_TD = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])


def routing(ids_TK=IDS_TK, probs_TK=PROBS_TK, num_experts=3):
    return Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=num_experts)


def test_a_case_by_hand():
    local = LocalDispatcher(3)
    plan = local.plan(routing())
    assert isinstance(plan, LocalPlan)
    assert (plan.num_tokens, plan.num_choices, plan.num_local_experts, plan.num_rows) == (3, 2, 3, 4)
    sent = dispatch(local, plan, X_TD, PROBS_TK)
    # Expert 0 has tokens 0 and 2, expert 1 none, expert 2 tokens 0 and 1.
    assert sent.rows_RD.tolist() == [[1.0, 10.0], [3.0, 30.0], [1.0, 10.0], [2.0, 20.0]]
    assert sent.probs_R.tolist() == [0.25, 4.0, 0.5, 2.0]
    assert sent.counts_E.tolist() == [2, 0, 2]
    assert sent.offsets_E.tolist() == [2, 2, 4]
    assert sent.plan is plan
    y_TD = combine(local, plan, sent.rows_RD * sent.probs_R.unsqueeze(1))
    assert y_TD.tolist() == [[0.75, 7.5], [4.0, 40.0], [12.0, 120.0]]


def test_padding_by_hand():
    """Row 41: counts without padding, offsets with it."""
    local = LocalDispatcher(3)
    plan = local.plan(routing(), Sizing(row_multiple=4))
    sent = dispatch(local, plan, X_TD, PROBS_TK)
    assert sent.offsets_E.tolist() == [4, 4, 8]
    assert sent.counts_E.tolist() == [2, 0, 2]
    assert sent.rows_RD[:, 0].tolist() == [1.0, 3.0, 0.0, 0.0, 1.0, 2.0, 0.0, 0.0]
    assert sent.probs_R.tolist() == [0.25, 4.0, 0.0, 0.0, 0.5, 2.0, 0.0, 0.0]
    garbage = sent.rows_RD.index_fill(0, torch.tensor([2, 3, 6, 7]), torch.nan)
    assert combine(local, plan, garbage)[:, 0].tolist() == [2.0, 2.0, 3.0], "padding rows do not come home"


@pytest.mark.parametrize("row_multiple", [1, 8])
def test_no_tokens_is_an_ordinary_case(row_multiple):
    local = LocalDispatcher(3)
    x_TD = torch.empty(0, 5, requires_grad=True)
    probs_TK = torch.empty(0, 2, requires_grad=True)
    experts_EDD = torch.randn(3, 5, 5, requires_grad=True)
    plan = local.plan(
        routing(torch.empty(0, 2, dtype=torch.int64), probs_TK.detach()), Sizing(row_multiple=row_multiple)
    )
    sent = dispatch(local, plan, x_TD, probs_TK)
    assert sent.rows_RD.shape == (0, 5)
    assert sent.offsets_E.tolist() == [0, 0, 0]
    y_TD = combine(local, plan, (sent.rows_RD @ experts_EDD[0]) * sent.probs_R.unsqueeze(1))
    assert y_TD.shape == (0, 5)
    y_TD.sum().backward()
    assert x_TD.grad.shape == (0, 5)
    assert probs_TK.grad.shape == (0, 2)
    assert experts_EDD.grad.abs().sum() == 0


def test_more_than_one_rank_is_refused_when_it_is_built():
    """Row 38."""

    def on_rank(rank, groups):
        for axis in ("ep", "etp"):
            several = AxisGroups({axis: groups.group("world")})
            words = rf"whole on one rank, but {axis} = 2; .*comm\.kind.*parallel\.{axis} = 1"
            with pytest.raises(MoeCommError, match=words):
                PLUGIN.build(LocalConfig(), several, 4)
        return True

    assert run_threads(2, on_rank) == [True, True]
    assert PLUGIN.build(LocalConfig(), AxisGroups(), 4).num_experts == 4


@pytest.mark.parametrize(
    ("ids_TK", "message"), [([[3, 0]], r"\b3\b"), ([[-2, 0]], "-2"), ([[0, 2**40]], str(2**40)), ([[-(2**40), 0]], "-")]
)
def test_ids_out_of_range_are_refused(ids_TK, message):
    with pytest.raises(MoeCommError, match=message):
        LocalDispatcher(3).plan(routing(torch.tensor(ids_TK), torch.ones(1, 2)))


def test_rows_of_another_plan_are_refused():
    local = LocalDispatcher(3)
    plan = local.plan(routing())
    with pytest.raises(MoeCommError, match="the plan has 4 rows"):
        local.prepare_return(plan, torch.ones(5, 2))
    parcel = local.prepare_return(plan, torch.ones(4, 2))
    with pytest.raises(MoeCommError, match="carries probabilities"):
        local.arrange(plan, parcel)


def test_r127_combine_gives_the_same_bits_twenty_times():
    generator = torch.Generator().manual_seed(0)
    local = LocalDispatcher(8)
    ids_TK = torch.randint(0, 8, (129, 6), generator=generator)
    probs_TK = torch.rand(129, 6, generator=generator)
    plan = local.plan(routing(ids_TK, probs_TK, 8))
    rows_RD = torch.randn(plan.num_rows, 16, generator=generator)
    first = combine(local, plan, rows_RD)
    assert all(torch.equal(combine(local, plan, rows_RD), first) for _ in range(19))
    # Sums of a token run over its choices in their order.
    by_choice_TKD = torch.stack([dispatch_of(local, ids_TK, k, plan, rows_RD) for k in range(6)], dim=1)
    expected = by_choice_TKD[:, 0]
    for k in range(1, 6):
        expected = expected + by_choice_TKD[:, k]
    assert torch.equal(first, expected)


def dispatch_of(local, ids_TK, k, plan, rows_RD):
    """Row of each token's k-th choice, found by counting: smaller experts first, then earlier (token, choice)."""
    flat = ids_TK.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda choice: (flat[choice], choice))
    row_of = {choice: row for row, choice in enumerate(order)}
    return rows_RD[[row_of[token * ids_TK.shape[1] + k] for token in range(ids_TK.shape[0])]]
