"""A dispatcher from outside: it conforms, agrees with the local one, and trains as one rank does."""

import pytest
import torch
from acme_dispatch import PLUGIN, AcmeConfig

from moe_comm import combine, dispatch
from moe_comm.local import LocalDispatcher
from moe_comm.testing import DispatcherConformance
from moe_kernels import Routing
from moe_parallel.testing import count_collectives, run_threads


class TestAcmeConforms(DispatcherConformance):
    plugin = PLUGIN
    config = AcmeConfig()
    worlds = (1, 2, 3, 4)
    roundings = 2  # partial sums of a rank travel in the dtype of the rows


def batch(seed, tokens, num_experts, top_k, hidden=6):
    """Tokens, choices and probabilities of all ranks, one tensor each; and expert matrices."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(tokens)
    x_TD = torch.randn(total, hidden, dtype=torch.float64, generator=generator)
    ids_TK = torch.randint(-1, num_experts, (total, top_k), generator=generator)
    probs_TK = torch.rand(total, top_k, dtype=torch.float64, generator=generator)
    experts_EDD = torch.randn(num_experts, hidden, hidden, dtype=torch.float64, generator=generator) / hidden**0.5
    return x_TD, ids_TK, probs_TK, experts_EDD


def moe(dispatcher, x_TD, ids_TK, probs_TK, experts_EDD, num_experts):
    plan = dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=probs_TK.detach(), num_experts=num_experts))
    sent = dispatch(dispatcher, plan, x_TD, probs_TK)
    starts = [0, *sent.offsets_E.tolist()]
    rows = [sent.rows_RD[starts[e] : starts[e + 1]] @ experts_EDD[e] for e in range(len(experts_EDD))]
    return combine(dispatcher, plan, torch.cat(rows) * sent.probs_R.unsqueeze(1)), sent


@pytest.mark.parametrize("tokens", [(5, 3), (0, 4, 9)])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_r046_r048_two_dispatchers_give_the_same_rows_and_outputs(tokens, top_k):
    world, num_experts = len(tokens), 4 * len(tokens)
    x_TD, ids_TK, probs_TK, experts_EDD = batch(top_k, tokens, num_experts, top_k)
    expected, rows = moe(LocalDispatcher(num_experts), x_TD, ids_TK, probs_TK, experts_EDD, num_experts)

    def on_rank(rank, groups):
        acme = PLUGIN.build(AcmeConfig(), groups, num_experts)
        mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        return moe(acme, x_TD[mine], ids_TK[mine], probs_TK[mine], experts_EDD[4 * rank : 4 * rank + 4], num_experts)

    results = run_threads(world, on_rank)
    assert [y_TD.shape[0] for y_TD, _ in results] == list(tokens)
    torch.testing.assert_close(torch.cat([y_TD for y_TD, _ in results]), expected, rtol=0, atol=1e-12)
    # One rank with all tokens holds the rows of all ranks, one after another, bit for bit.
    assert torch.equal(torch.cat([sent.rows_RD for _, sent in results]), rows.rows_RD)
    assert torch.equal(torch.cat([sent.probs_R for _, sent in results]), rows.probs_R)
    assert torch.equal(torch.cat([sent.counts_E for _, sent in results]), rows.counts_E)


@pytest.mark.parametrize("world", [1, 2])
def test_r046_one_rank_gets_one_row_per_token_back(world):
    x_TD, ids_TK, probs_TK, experts_EDD = batch(0, (7,), 4, 3)

    def on_rank(rank, groups):
        acme = PLUGIN.build(AcmeConfig(), groups, 4)
        share = 4 // world
        y_TD, _ = moe(acme, x_TD, ids_TK, probs_TK, experts_EDD[rank * share : (rank + 1) * share], 4)
        return y_TD

    expected, _ = moe(LocalDispatcher(4), x_TD, ids_TK, probs_TK, experts_EDD, 4)
    for y_TD in run_threads(world, on_rank):
        assert y_TD.shape == x_TD.shape
        torch.testing.assert_close(y_TD, expected, rtol=0, atol=1e-12)


def test_one_rank_needs_no_communication():
    x_TD, ids_TK, probs_TK, experts_EDD = batch(1, (5,), 4, 2)

    def on_rank(rank, groups):
        with count_collectives() as issued:
            moe(PLUGIN.build(AcmeConfig(), groups, 4), x_TD, ids_TK, probs_TK, experts_EDD, 4)
        return issued

    assert run_threads(1, on_rank) == [[]]


def test_r044_the_router_learns_through_the_exchange():
    tokens, num_experts = (4, 6), 6
    x_TD, _, _, experts_EDD = batch(2, tokens, num_experts, 2)
    gate_DE = torch.randn(6, num_experts, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def router_grad(dispatcher, x_TD, experts_EDD):
        gate = gate_DE.clone().requires_grad_()
        probs_TK, ids_TK = torch.softmax(x_TD @ gate, dim=1).topk(2, dim=1)
        y_TD, _ = moe(dispatcher, x_TD, ids_TK, probs_TK, experts_EDD, num_experts)
        y_TD.square().sum().backward()
        return gate.grad

    def on_rank(rank, groups):
        acme = PLUGIN.build(AcmeConfig(), groups, num_experts)
        mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        return router_grad(acme, x_TD[mine], experts_EDD[3 * rank : 3 * rank + 3])

    expected = router_grad(LocalDispatcher(num_experts), x_TD, experts_EDD)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(sum(run_threads(2, on_rank)), expected, rtol=0, atol=1e-12)


def test_r051_experts_without_tokens_step_as_on_one_rank():
    tokens, num_experts = (4, 3), 4
    x_TD, _, probs_TK, experts_EDD = batch(4, tokens, num_experts, 2)
    ids_TK = torch.tensor([[0, 1]] * 7)  # both experts are on rank 0

    def step(dispatcher, x_TD, ids_TK, probs_TK, experts_EDD):
        weights = [expert.clone().requires_grad_() for expert in experts_EDD]
        optimizer = torch.optim.AdamW(weights, lr=0.1, weight_decay=0.5)
        for _ in range(2):
            optimizer.zero_grad()
            y_TD, _ = moe(dispatcher, x_TD, ids_TK, probs_TK, weights, num_experts)
            y_TD.square().sum().backward()
            assert all(weight.grad is not None for weight in weights)
            optimizer.step()
        return [weight.detach() for weight in weights], [optimizer.state[weight]["exp_avg"] for weight in weights]

    def on_rank(rank, groups):
        acme = PLUGIN.build(AcmeConfig(), groups, num_experts)
        mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        return step(acme, x_TD[mine], ids_TK[mine], probs_TK[mine], experts_EDD[2 * rank : 2 * rank + 2])

    results = run_threads(2, on_rank, timeout_s=20)
    weights, moments = step(LocalDispatcher(num_experts), x_TD, ids_TK, probs_TK, experts_EDD)
    for kind, expected in ((0, weights), (1, moments)):
        for got, want in zip([*results[0][kind], *results[1][kind]], expected, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert (weights[2] - experts_EDD[2]).abs().max() > 1e-3, "an expert without tokens still decays"
