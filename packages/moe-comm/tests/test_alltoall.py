"""The all-to-all dispatcher: the conformance kit, one rank's layer in parts, and what may differ between ranks.

A whole layer (router, dispatch, gated experts, combine) on several ranks must equal the layer of one rank with all
tokens and all experts, in float64 to 1e-12. Ranks are threads here; `test_alltoall_processes.py` has them on gloo.
"""

import threading
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moe_comm import EXACT, AllToAllConfig, MoeCommError, Sizing, combine, dispatch
from moe_comm.alltoall import PLUGIN, AllToAllDispatcher, AllToAllPlan
from moe_comm.local import LocalDispatcher
from moe_comm.testing import DispatcherConformance
from moe_kernels import GroupedExperts, RouterConfig, Routing, route, select_grouped_gemm
from moe_parallel import AxisGroups, all_to_all
from moe_parallel.testing import count_collectives, run_threads

HIDDEN, FFN = 6, 5


class TestAllToAllConforms(DispatcherConformance):
    plugin = PLUGIN
    config = AllToAllConfig()
    worlds = (1, 2, 3, 4, (2, 1), (2, 2), (2, 3), (3, 1))


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Tokens of all ranks, one after another, and the layer's weights."""

    tokens: tuple[int, ...]
    x_TD: Tensor
    gate_DE: Tensor
    weights: list[Tensor]
    router: RouterConfig
    grad_TD: Tensor
    forced_TK: Tensor | None = None

    @property
    def num_experts(self) -> int:
        return self.gate_DE.shape[1]

    def of_rank(self, rank: int) -> "Problem":
        """The tokens and experts of one rank; the gate is everybody's."""
        share = self.num_experts // len(self.tokens)
        mine = slice(sum(self.tokens[:rank]), sum(self.tokens[: rank + 1]))
        return replace(
            self,
            x_TD=self.x_TD[mine],
            grad_TD=self.grad_TD[mine],
            forced_TK=None if self.forced_TK is None else self.forced_TK[mine],
            weights=[weight[rank * share : (rank + 1) * share] for weight in self.weights],
        )


def problem(seed, tokens, num_experts, top_k, forced_TK=None):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return Problem(
        tokens=tokens,
        x_TD=normal(sum(tokens), HIDDEN),
        gate_DE=normal(HIDDEN, num_experts),
        weights=[normal(*weight.shape) / 2 for weight in experts(num_experts).parameters()],
        router=RouterConfig(top_k=top_k, normalize=False),
        grad_TD=normal(sum(tokens), HIDDEN),
        forced_TK=forced_TK,
    )


def experts(num_experts):
    backend = select_grouped_gemm("loop", torch.float64, "cpu")
    return GroupedExperts(num_experts, HIDDEN, FFN, backend=backend, dtype=torch.float64)


def layer(dispatcher, part: Problem, sizing: Sizing = EXACT):
    """Output, then gradients of tokens, probabilities, gate and expert weights."""
    x_TD, gate_DE = part.x_TD.clone().requires_grad_(), part.gate_DE.clone().requires_grad_()
    modules = experts(part.weights[0].shape[0])
    for parameter, weight in zip(modules.parameters(), part.weights, strict=True):
        parameter.data.copy_(weight)
    routing = route(x_TD @ gate_DE, part.router, ids_TK=part.forced_TK)
    routing.probs_TK.retain_grad()
    plan = dispatcher.plan(routing, sizing)
    sent = dispatch(dispatcher, plan, x_TD, routing.probs_TK)
    y_TD = combine(dispatcher, plan, modules(sent.rows_RD, sent.probs_R, sent.offsets_E))
    y_TD.backward(part.grad_TD)
    grads = [x_TD.grad, routing.probs_TK.grad, gate_DE.grad, *(parameter.grad for parameter in modules.parameters())]
    assert all(grad is not None for grad in grads), "a gradient of zero is not an absent one"
    return [y_TD.detach(), *grads]


def layer_on_ranks(whole: Problem, sizing: Sizing = EXACT):
    """The same, put together from the ranks: tokens and experts one after another, the gate's gradient summed."""

    def on_rank(rank, groups):
        return layer(AllToAllDispatcher(groups, whole.num_experts), whole.of_rank(rank), sizing)

    parts = list(zip(*run_threads(len(whole.tokens), on_rank, timeout_s=20), strict=True))
    return [sum(values) if place == 3 else torch.cat(values) for place, values in enumerate(parts)]


def assert_equal_to_one_rank(whole: Problem, sizing: Sizing = EXACT):
    expected = layer(LocalDispatcher(whole.num_experts), whole, sizing)
    for got, want in zip(layer_on_ranks(whole, sizing), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    return expected


@pytest.mark.parametrize("tokens", [(9,), (5, 3), (0, 4, 9), (2, 7, 0, 5)])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_r044_r046_r048_the_layer_is_that_of_one_rank(tokens, top_k):
    expected = assert_equal_to_one_rank(problem(top_k, tokens, 4 * len(tokens) if top_k <= 4 else 12, top_k))
    assert all(value.abs().max() > 1e-2 for value in expected)


@pytest.mark.parametrize("row_multiple", [3, 16])
def test_padding_changes_nothing(row_multiple):
    assert_equal_to_one_rank(problem(3, (5, 8), 6, 2), Sizing(row_multiple=row_multiple))


@pytest.mark.parametrize("tokens", [(0, 6), (6, 0), (0, 0, 5, 0), (0, 0)])
def test_r051_ranks_without_tokens_take_part(tokens):
    assert_equal_to_one_rank(problem(4, tokens, 2 * len(tokens), 2))


@pytest.mark.parametrize("chosen", [0, 1])
def test_r051_experts_that_nobody_chose_have_zero_gradients(chosen):
    """All tokens go to one rank; the experts of the other still get a gradient, of zero."""
    tokens = (4, 3)
    forced_TK = torch.tensor([[2 * chosen, 2 * chosen + 1]] * 7)
    whole = problem(5, tokens, 4, 2, forced_TK)
    *_, grad_w1, grad_w2 = assert_equal_to_one_rank(whole)
    idle = slice(2, 4) if chosen == 0 else slice(0, 2)
    for grad in (grad_w1, grad_w2):
        assert grad[idle].abs().max() == 0
        assert grad.abs().max() > 1e-2


def test_r051_idle_experts_decay_as_on_one_rank():
    """Two steps of AdamW: weights and moments of experts without tokens move as they do on one rank."""
    tokens, num_experts = (4, 3), 4
    whole = problem(6, tokens, num_experts, 2, torch.tensor([[0, 1]] * 7))

    def steps(dispatcher, part):
        weights = [weight.clone() for weight in part.weights]
        optimizer = torch.optim.AdamW(weights, lr=0.1, weight_decay=0.5)
        for _ in range(2):
            *_, grad_w1, grad_w2 = layer(dispatcher, replace(part, weights=weights))
            weights[0].grad, weights[1].grad = grad_w1, grad_w2
            optimizer.step()
        return [*weights, *(optimizer.state[weight]["exp_avg"] for weight in weights)]

    expected = steps(LocalDispatcher(num_experts), whole)
    results = run_threads(
        2, lambda rank, groups: steps(AllToAllDispatcher(groups, num_experts), whole.of_rank(rank)), timeout_s=20
    )
    for got, want in zip(map(torch.cat, zip(*results, strict=True)), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert (expected[0][2:] - whole.weights[0][2:]).abs().max() > 1e-3, "an expert without tokens still decays"


@pytest.mark.parametrize("row_multiple", [1, 8])
def test_r042_counts_are_those_of_the_ids_that_arrived(row_multiple):
    """Every row carries its expert's id, and rank r's rows its number: they arrive in blocks, expert by expert."""
    tokens, top_k, share = (5, 0, 9), 3, 4
    world, num_experts = len(tokens), share * len(tokens)

    def on_rank(rank, groups):
        ids_TK = torch.randint(-1, num_experts, (tokens[rank], 1), generator=torch.Generator().manual_seed(rank))
        ids_TK = ids_TK.expand(-1, top_k)
        x_TD = torch.stack((ids_TK[:, 0], torch.full((tokens[rank],), rank)), 1).double()
        dispatcher = AllToAllDispatcher(groups, num_experts)
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
    """Padding tokens (ids -1) take no row and come back as exactly zero."""

    def on_rank(rank, groups):
        dispatcher = AllToAllDispatcher(groups, 2)
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
        dispatcher = AllToAllDispatcher(groups, 6)
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
            AllToAllDispatcher(groups, 8).plan(routing)

    run_threads(4, on_rank)


@pytest.mark.parametrize("world", [1, 3])
def test_collectives_of_a_step(world):
    """One for the plan, two there and one back, and the same again in backward; none on one rank."""
    whole = problem(7, tuple(range(world)), 2 * world, 2)

    def on_rank(rank, groups):
        part, counted = whole.of_rank(rank), []
        dispatcher = AllToAllDispatcher(groups, whole.num_experts)
        x_TD = part.x_TD.clone().requires_grad_()
        routing = route(x_TD @ part.gate_DE, part.router)
        with count_collectives() as issued:
            plan = dispatcher.plan(routing)
        counted.append(len(issued))
        with count_collectives() as issued:
            sent = dispatch(dispatcher, plan, x_TD, routing.probs_TK)
        counted.append(len(issued))
        with count_collectives() as issued:
            y_TD = combine(dispatcher, plan, sent.rows_RD * sent.probs_R[:, None])
        counted.append(len(issued))
        with count_collectives() as issued:
            y_TD.backward(part.grad_TD)
        assert set(issued) <= {"all_to_all_single", "alltoall_base"}  # the name differs between releases of torch
        return [*counted, len(issued)]

    assert run_threads(world, on_rank) == [[1, 2, 1, 3] if world > 1 else [0, 0, 0, 0]] * world


def test_both_tensors_are_under_way_before_one_is_waited_for(monkeypatch):
    """In backward too; and nothing is waited for before the caller waits."""
    events = threading.local()

    class Watched:
        def __init__(self, pending):
            self.pending = pending

        def wait(self):
            events.seen.append("wait")
            return self.pending.wait()

        def done(self):
            return False

    def watched(x, group, **splits):
        events.seen.append("issue")
        return Watched(all_to_all(x, group, **splits))

    monkeypatch.setattr("moe_comm.exchange.all_to_all", watched)

    def on_rank(rank, groups):
        events.seen = []
        x_TD, probs_TK = torch.randn(3, 2, requires_grad=True), torch.rand(3, 1, requires_grad=True)
        dispatcher = AllToAllDispatcher(groups, 2)
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
    dispatcher = AllToAllDispatcher(AxisGroups(), 3)
    probs_TK = torch.ones(2, 1)
    plan = dispatcher.plan(Routing(ids_TK=torch.tensor([[2], [0]]), probs_TK=probs_TK, num_experts=3))
    assert isinstance(plan, AllToAllPlan)
    with pytest.raises(MoeCommError, match="the plan has 2 rows"):
        dispatcher.prepare_return(plan, torch.ones(3, 2))
    with pytest.raises(MoeCommError, match="carries probabilities"):
        dispatcher.arrange(plan, dispatcher.prepare_return(plan, torch.ones(2, 2)))
