"""A whole layer (router, dispatch, gated experts, combine) over several ranks: that of one rank, with every dispatcher.

One rank has all tokens and all experts; equal in float64 to 1e-12. Ranks are threads here; the tests of processes have
them on gloo.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from moe_comm import (
    EXACT,
    AllGatherConfig,
    AllToAllConfig,
    HybridConfig,
    Sizing,
    build_dispatcher,
    combine,
    dispatch,
)
from moe_comm.local import LocalDispatcher
from moe_comm.testing.harness import split_groups
from moe_kernels import GroupedExperts, RouterConfig, route, select_grouped_gemm
from moe_parallel.testing import run_threads

HIDDEN, FFN = 6, 5

CONFIGS = {
    "alltoall": AllToAllConfig(),
    "per_expert": AllToAllConfig(row="per_expert"),
    "allgather": AllGatherConfig(),
    "hybrid": HybridConfig(),
    "rail_allgather": HybridConfig(rail="allgather", lanes=2),
}

every_dispatcher = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def build(config, groups, num_experts):
    """A dispatcher; ranks of `hybrid` are two nodes where their number is even, else each is a node."""
    world = groups.size("world")
    nodes = world if world % 2 else 2
    return build_dispatcher(config, split_groups(groups.rank("world"), groups, 1, nodes), num_experts)


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


def layer_on_ranks(config, whole: Problem, sizing: Sizing = EXACT):
    """The same, put together from the ranks: tokens and experts one after another, the gate's gradient summed."""

    def on_rank(rank, groups):
        return layer(build(config, groups, whole.num_experts), whole.of_rank(rank), sizing)

    parts = list(zip(*run_threads(len(whole.tokens), on_rank, timeout_s=20), strict=True))
    return [sum(values) if place == 3 else torch.cat(values) for place, values in enumerate(parts)]


def assert_equal_to_one_rank(config, whole: Problem, sizing: Sizing = EXACT):
    expected = layer(LocalDispatcher(whole.num_experts), whole, sizing)
    for got, want in zip(layer_on_ranks(config, whole, sizing), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    return expected


@every_dispatcher
@pytest.mark.parametrize("tokens", [(9,), (5, 3), (0, 4, 9), (2, 7, 0, 5)])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_r044_r046_r048_the_layer_is_that_of_one_rank(config, tokens, top_k):
    """Rows 8 and 30."""
    expected = assert_equal_to_one_rank(config, problem(top_k, tokens, 4 * len(tokens) if top_k <= 4 else 12, top_k))
    assert all(value.abs().max() > 1e-2 for value in expected)


@every_dispatcher
@pytest.mark.parametrize("row_multiple", [3, 16])
def test_padding_changes_nothing(config, row_multiple):
    assert_equal_to_one_rank(config, problem(3, (5, 8), 6, 2), Sizing(row_multiple=row_multiple))


@every_dispatcher
@pytest.mark.parametrize("tokens", [(0, 6), (6, 0), (0, 0, 5, 0), (0, 0)])
def test_r051_ranks_without_tokens_take_part(config, tokens):
    """Rows 1, 2 and 3."""
    assert_equal_to_one_rank(config, problem(4, tokens, 2 * len(tokens), 2))


@every_dispatcher
@pytest.mark.parametrize("chosen", [0, 1])
def test_r051_experts_that_nobody_chose_have_zero_gradients(config, chosen):
    """All tokens go to one rank; the experts of the other still get a gradient, of zero. Row 4."""
    tokens = (4, 3)
    forced_TK = torch.tensor([[2 * chosen, 2 * chosen + 1]] * 7)
    whole = problem(5, tokens, 4, 2, forced_TK)
    *_, grad_w1, grad_w2 = assert_equal_to_one_rank(config, whole)
    idle = slice(2, 4) if chosen == 0 else slice(0, 2)
    for grad in (grad_w1, grad_w2):
        assert grad[idle].abs().max() == 0
        assert grad.abs().max() > 1e-2


@every_dispatcher
def test_r051_idle_experts_decay_as_on_one_rank(config):
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
        2, lambda rank, groups: steps(build(config, groups, num_experts), whole.of_rank(rank)), timeout_s=20
    )
    for got, want in zip(map(torch.cat, zip(*results, strict=True)), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    assert (expected[0][2:] - whole.weights[0][2:]).abs().max() > 1e-3, "an expert without tokens still decays"
