"""Split experts between processes, on gloo and the groups of a `FoldedMesh`: the layer of one rank."""

import pytest
import torch

from moe_comm import AllGatherConfig, AutoConfig, HybridConfig, MoeCommError, build_dispatcher, combine, dispatch
from moe_comm.local import LocalDispatcher
from moe_kernels import Routing
from moe_parallel import ParallelLayout, run_distributed

pytestmark = pytest.mark.dist

HIDDEN, FFN, TOP_K, SHARE = 5, 6, 3, 2
TOKENS = (6, 0, 3, 9, 1, 4)  # of each rank of the world


def inputs(rank, num_experts):
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(TOKENS[rank], HIDDEN, dtype=torch.float64, generator=generator)
    ids_TK = torch.randint(-1, num_experts, (TOKENS[rank], TOP_K), generator=generator)
    probs_TK = torch.rand(TOKENS[rank], TOP_K, dtype=torch.float64, generator=generator)
    return x_TD, ids_TK, probs_TK


def matrices(num_experts):
    generator = torch.Generator().manual_seed(99)
    w1_EDF = torch.randn(num_experts, HIDDEN, FFN, dtype=torch.float64, generator=generator)
    return w1_EDF / 2, torch.randn(num_experts, FFN, HIDDEN, dtype=torch.float64, generator=generator) / 2


def layer(dispatcher, x_TD, ids_TK, probs_TK, w1_EDF, w2_EFD, num_experts):
    """Output and the gradients of tokens, probabilities and matrices, for a gradient of the output of twice itself."""
    leaves = [tensor.clone().requires_grad_() for tensor in (x_TD, probs_TK, w1_EDF, w2_EFD)]
    x_TD, probs_TK, w1_EDF, w2_EFD = leaves
    plan = dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=num_experts))
    sent = dispatch(dispatcher, plan, x_TD, probs_TK)
    expert_R = torch.searchsorted(sent.offsets_E, torch.arange(plan.num_rows), right=True)
    h_RF = torch.tanh(torch.einsum("rd,rdf->rf", sent.rows_RD, w1_EDF[expert_R])) * sent.probs_R[:, None]
    y_TD = combine(dispatcher, plan, torch.einsum("rf,rfd->rd", h_RF, w2_EFD[expert_R]))
    return [y_TD.detach(), *torch.autograd.grad(y_TD.square().sum(), leaves)]


@pytest.mark.parametrize(
    ("config", "etp", "ep", "edp", "ep_inner"),
    [
        (AutoConfig(), 2, 1, 1, 1),
        (AutoConfig(), 2, 3, 1, 1),
        (AutoConfig(), 3, 1, 2, 1),
        (AllGatherConfig(), 2, 2, 1, 1),
        (HybridConfig(), 1, 6, 1, 3),
        (HybridConfig(lanes=2), 2, 2, 1, 1),
    ],
    ids=lambda value: getattr(value, "kind", value),
)
def test_r043_processes_give_the_layer_of_one_rank(config, etp, ep, edp, ep_inner):
    """In fp64 to 1e-12; with edp = 2 there are two blocks that never meet."""
    block, num_experts = etp * ep, SHARE * ep

    def on_rank(mesh):
        rank = mesh.rank("world")
        local = slice(mesh.rank("ep") * SHARE, (mesh.rank("ep") + 1) * SHARE)
        inner = slice(mesh.rank("etp") * FFN // etp, (mesh.rank("etp") + 1) * FFN // etp)
        w1_EDF, w2_EFD = matrices(num_experts)
        dispatcher = build_dispatcher(config, mesh, num_experts)
        return layer(dispatcher, *inputs(rank, num_experts), w1_EDF[local, :, inner], w2_EFD[local, inner], num_experts)

    results = run_distributed(
        ParallelLayout(world=block * edp, etp=etp, ep=ep), on_rank, timeout_s=20, ep_inner=ep_inner
    )
    for first in range(0, block * edp, block):
        ranks = range(first, first + block)
        whole = [torch.cat(parts) for parts in zip(*(inputs(rank, num_experts) for rank in ranks), strict=True)]
        expected = layer(LocalDispatcher(num_experts), *whole, *matrices(num_experts), num_experts)
        for which, want in enumerate(expected):
            parts = [results[rank][which] for rank in ranks]
            if which >= 3:
                inner_dim = 2 if which == 3 else 1
                parts = [torch.cat(parts[place : place + etp], inner_dim) for place in range(0, block, etp)]
            torch.testing.assert_close(torch.cat(parts), want, rtol=0, atol=1e-12)
            assert want.abs().max() > 0.1


def test_a_bad_id_is_an_error_of_the_whole_block_and_of_no_other():
    """Ranks 2 and 3 share the experts of a block; rank 3 has the id, rank 2 hears of it, ranks 0 and 1 go on."""

    def on_rank(mesh):
        dispatcher = build_dispatcher(AutoConfig(), mesh, 4)
        ids_TK = torch.tensor([[77 if mesh.rank("world") == 3 else 0]])
        try:
            return dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=torch.ones(1, 1), num_experts=4)).num_rows
        except MoeCommError as error:
            return str(error)

    results = run_distributed(ParallelLayout(world=4, etp=2), on_rank, timeout_s=20)
    assert results[:2] == [2, 2]
    assert results[2] == results[3]
    assert results[3].startswith("rank 3: expert id 77 is out of range")
