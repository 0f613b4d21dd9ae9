"""Dispatchers between processes, on gloo: the layer of one rank, alone and inside a larger world."""

import pytest
import torch

from moe_comm import (
    AllGatherConfig,
    AllToAllConfig,
    HybridConfig,
    MoeCommError,
    build_dispatcher,
    combine,
    dispatch,
)
from moe_comm.local import LocalDispatcher
from moe_kernels import Routing
from moe_parallel import ParallelLayout, run_distributed

pytestmark = pytest.mark.dist

HIDDEN, TOP_K, SHARE = 5, 3, 2
TOKENS = (6, 0, 3, 9)  # of each rank of the world


def inputs(rank, num_experts):
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(TOKENS[rank], HIDDEN, dtype=torch.float64, generator=generator)
    ids_TK = torch.randint(-1, num_experts, (TOKENS[rank], TOP_K), generator=generator)
    probs_TK = torch.rand(TOKENS[rank], TOP_K, dtype=torch.float64, generator=generator)
    return x_TD, ids_TK, probs_TK


def matrices(num_experts):
    return torch.randn(num_experts, HIDDEN, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(99))


def layer(dispatcher, x_TD, ids_TK, probs_TK, experts_EDD, num_experts):
    """Output and the gradients of tokens, probabilities and experts, for a gradient of the output of twice itself."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x_TD, probs_TK, experts_EDD)]
    x_TD, probs_TK, experts_EDD = leaves
    plan = dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=num_experts))
    sent = dispatch(dispatcher, plan, x_TD, probs_TK)
    expert_R = torch.searchsorted(sent.offsets_E, torch.arange(plan.num_rows), right=True)
    rows_RD = torch.einsum("rd,rdo->ro", sent.rows_RD, experts_EDD[expert_R]) * sent.probs_R[:, None]
    y_TD = combine(dispatcher, plan, rows_RD)
    return [y_TD.detach(), *torch.autograd.grad(y_TD.square().sum(), leaves)]


@pytest.mark.parametrize(
    ("config", "world", "ep", "inner"),
    [
        (AllToAllConfig(), 2, 2, 1),
        (AllToAllConfig(), 4, 4, 1),
        (AllToAllConfig(), 4, 2, 1),
        (AllToAllConfig(row="per_expert"), 4, 4, 1),
        (AllGatherConfig(), 2, 2, 1),
        (AllGatherConfig(), 4, 4, 1),
        (HybridConfig(), 4, 4, 2),
        (HybridConfig(), 4, 2, 2),
        (HybridConfig(lanes=3), 4, 4, 2),
        (HybridConfig(rail="allgather", lanes=2), 4, 4, 2),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_processes_give_the_layer_of_one_rank(config, world, ep, inner):
    """In fp64 to 1e-12; with ep = 2 of 4 ranks there are two groups, of 6 and 12 tokens, that never meet."""
    num_experts = SHARE * ep

    def on_rank(mesh):
        place, rank = mesh.rank("ep"), mesh.rank("world")
        dispatcher = build_dispatcher(config, mesh, num_experts)
        mine = matrices(num_experts)[place * SHARE : (place + 1) * SHARE]
        return layer(dispatcher, *inputs(rank, num_experts), mine, num_experts)

    results = run_distributed(ParallelLayout(world=world, ep=ep), on_rank, timeout_s=20, ep_inner=inner)
    for first in range(0, world, ep):
        group = range(first, first + ep)
        whole = [torch.cat(parts) for parts in zip(*(inputs(rank, num_experts) for rank in group), strict=True)]
        expected = layer(LocalDispatcher(num_experts), *whole, matrices(num_experts), num_experts)
        for place, want in enumerate(expected):
            got = torch.cat([results[rank][place] for rank in group])
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
            assert want.abs().max() > 0.1


@pytest.mark.parametrize("config", [AllToAllConfig(), AllGatherConfig()], ids=lambda config: config.kind)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_low_precision_travels_bit_for_bit(dtype, config):
    def tokens(rank):
        return torch.randn(5, 3, generator=torch.Generator().manual_seed(rank)).to(dtype)

    def on_rank(mesh):
        dispatcher = build_dispatcher(config, mesh, 2)
        x_TD, probs_TK = tokens(mesh.rank("ep")), torch.full((5, 2), 0.1)
        plan = dispatcher.plan(Routing(ids_TK=torch.tensor([[0, 1]] * 5), probs_TK=probs_TK, num_experts=2))
        sent = dispatch(dispatcher, plan, x_TD, probs_TK)
        assert torch.equal(sent.rows_RD, torch.cat((tokens(0), tokens(1))))
        assert torch.equal(sent.probs_R, torch.full((10,), 0.1))
        assert torch.equal(combine(dispatcher, plan, sent.rows_RD), x_TD * 2)
        return plan.num_rows

    assert run_distributed(ParallelLayout(world=2, ep=2), on_rank, timeout_s=20) == [10, 10]


def test_a_bad_id_in_one_group_is_an_error_of_that_group_alone():
    """Ranks 2 and 3 are a group; rank 3 has the id, rank 2 hears of it, ranks 0 and 1 go on."""

    def on_rank(mesh):
        dispatcher = build_dispatcher(AllToAllConfig(), mesh, 4)
        ids_TK = torch.tensor([[77 if mesh.rank("world") == 3 else 0]])
        try:
            return dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=torch.ones(1, 1), num_experts=4)).num_rows
        except MoeCommError as error:
            return str(error)

    results = run_distributed(ParallelLayout(world=4, ep=2), on_rank, timeout_s=20)
    assert results[:2] == [2, 0]
    assert results[2] == results[3]
    assert results[3].startswith("rank 3: expert id 77 is out of range")
