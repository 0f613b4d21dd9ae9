"""Shape legend: T tokens, K choices, E experts."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from moe_kernels import MoeKernelsError, RouterConfig, TokenRandom, route, sinkhorn_choices

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def skewed(tokens: int, experts: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(tokens, experts, dtype=dtype, device=DEVICE) + torch.arange(experts, device=DEVICE) / 2


def training(tokens: int) -> TokenRandom:
    return TokenRandom(seed=0, step=0, index_T=torch.arange(tokens, device=DEVICE))


def alternately_scaled(logits_TE: Tensor, iterations: int) -> Tensor:
    """The plan by its definition: exp(logits), rows and columns divided by their sums in turn."""
    plan_TE = logits_TE.exp()
    for _ in range(iterations):
        plan_TE = plan_TE / plan_TE.sum(1, keepdim=True)
        plan_TE = plan_TE / plan_TE.sum(0, keepdim=True)
    return plan_TE


@pytest.mark.parametrize("iterations", [0, 1, 5])
def test_choices_are_the_largest_shares_of_the_alternately_scaled_matrix(iterations: int) -> None:
    logits_TE = skewed(40, 6)
    ids_TK = sinkhorn_choices(logits_TE, 2, iterations)
    assert torch.equal(ids_TK, alternately_scaled(logits_TE, iterations).topk(2).indices)


def test_loads_become_even() -> None:
    logits_TE = skewed(512, 8)
    most = [int(torch.bincount(sinkhorn_choices(logits_TE, 1, n).flatten(), minlength=8).max()) for n in (0, 1, 8)]
    assert most[0] > 200
    assert most[0] > most[1] > most[2]
    assert most[2] < 96  # 64 is even


@pytest.mark.parametrize("scale", [1e4, 1e-4])
def test_logits_of_any_size_give_different_valid_experts(scale: float) -> None:
    ids_TK = sinkhorn_choices(scale * skewed(64, 6, torch.float32), 3, 20)
    assert ((ids_TK >= 0) & (ids_TK < 6)).all()
    assert (ids_TK.sort(-1).values.diff(dim=-1) > 0).all()


def test_ranks_that_share_the_tokens_choose_as_one_would() -> None:
    logits_TE = skewed(30, 5)
    valid_T = torch.rand(30, device=DEVICE) < 0.8
    whole_TK = sinkhorn_choices(logits_TE, 2, 4, valid_T=valid_T)
    halves = [slice(0, 11), slice(11, 30)]
    loads: dict[int, Tensor] = {}
    barrier = Barrier(2, timeout=10)

    def choose(rank: int) -> Tensor:
        def reduce(load_E: Tensor) -> Tensor:
            loads[rank] = load_E
            barrier.wait()
            total_E = loads[0] + loads[1]
            barrier.wait()
            return total_E

        half = halves[rank]
        return sinkhorn_choices(logits_TE[half], 2, 4, valid_T=valid_T[half], reduce=reduce)

    with ThreadPoolExecutor(2) as ranks:
        assert torch.equal(torch.cat(list(ranks.map(choose, range(2)))), whole_TK)


def test_padding_and_bad_rows_are_in_no_plan() -> None:
    logits_TE = skewed(20, 6)
    dirty_TE = torch.cat((logits_TE, torch.full((2, 6), float("nan"), device=DEVICE), 50 * skewed(5, 6)))
    valid_T = torch.arange(27, device=DEVICE) < 22
    got_TK = sinkhorn_choices(dirty_TE, 2, 6, valid_T=valid_T)
    assert torch.equal(got_TK[:20], sinkhorn_choices(logits_TE, 2, 6))
    assert torch.equal(got_TK[20:22], torch.tensor([[0, 1]] * 2, device=DEVICE))
    nothing_TK = sinkhorn_choices(logits_TE, 2, 6, valid_T=torch.zeros(20, dtype=torch.bool, device=DEVICE))
    assert torch.equal(nothing_TK, sinkhorn_choices(logits_TE, 2, 0))


@pytest.mark.usefixtures("implementation")
def test_a_router_plans_in_training_and_repeats_what_it_chose() -> None:
    logits_TE = skewed(64, 6, torch.float32).requires_grad_()
    config = RouterConfig(top_k=2, score="sigmoid", sinkhorn_iterations=6)
    calls: list[Tensor] = []

    def reduce(load_E: Tensor) -> Tensor:
        calls.append(load_E)
        return load_E

    trained = route(logits_TE, config, random=training(64), reduce=reduce)
    assert len(calls) == 6
    assert torch.equal(trained.ids_TK, sinkhorn_choices(logits_TE, 2, 6))
    sigma_TK = logits_TE.sigmoid().gather(-1, trained.ids_TK)
    torch.testing.assert_close(trained.probs_TK, sigma_TK / sigma_TK.sum(-1, keepdim=True))
    route(logits_TE, config, ids_TK=trained.ids_TK, random=training(64), reduce=reduce)
    assert len(calls) == 6
    evaluated = route(logits_TE, config)
    assert torch.equal(evaluated.ids_TK, route(logits_TE, RouterConfig(top_k=2)).ids_TK)
    assert int(evaluated.counts_E().max()) > int(trained.counts_E().max())


def test_a_bias_does_not_steer_a_plan() -> None:
    with pytest.raises(MoeKernelsError, match="does not steer a transport plan"):
        route(skewed(4, 6), RouterConfig(sinkhorn_iterations=1), bias_E=torch.zeros(6), random=training(4))
