"""Faults that were reported of other libraries, by their row in `docs/comm-faults.md`, where no other test has them."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from moe_comm import AllGatherConfig, AllToAllConfig, HybridConfig, Sizing, build_dispatcher, combine, dispatch
from moe_comm.testing.harness import split_groups
from moe_kernels import Routing
from moe_parallel.testing import run_threads

TABLE = Path(__file__).parents[3] / "docs" / "comm-faults.md"

every_dispatcher = pytest.mark.parametrize(
    "config",
    [AllToAllConfig(), AllGatherConfig(), HybridConfig(), HybridConfig(lanes=2)],
    ids=["alltoall", "allgather", "hybrid", "lanes"],
)


def inputs(rank, num_tokens, num_experts, *, top_k=2, hidden=4, dtype=torch.float64):
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randint(-8, 9, (num_tokens, hidden), generator=generator).to(dtype)
    ids_TK = torch.randint(0, num_experts, (num_tokens, top_k), generator=generator)
    return x_TD, Routing(ids_TK=ids_TK, probs_TK=torch.ones(num_tokens, top_k), num_experts=num_experts)


def every_token_returns(config, tokens, nodes, *, sizing=None, experts_per_rank=1, **sizes):
    """Each rank's tokens come back as often as they have choices; whole numbers, so exactly."""
    world = len(tokens)
    num_experts = experts_per_rank * world

    def on_rank(rank, groups):
        dispatcher = build_dispatcher(config, split_groups(rank, groups, 1, nodes), num_experts)
        x_TD, routing = inputs(rank, tokens[rank], num_experts, **sizes)
        plan = dispatcher.plan(routing, sizing or Sizing())
        sent = dispatch(dispatcher, plan, x_TD, routing.probs_TK)
        assert int(sent.offsets_E[-1]) <= plan.num_rows
        assert torch.equal(combine(dispatcher, plan, sent.rows_RD), x_TD * routing.ids_TK.shape[1])
        return int(sent.counts_E.sum())

    assert sum(run_threads(world, on_rank)) == sum(tokens) * inputs(0, 1, 1, **sizes)[1].ids_TK.shape[1]


@every_dispatcher
@pytest.mark.parametrize("tokens", [(4095, 4095), (5, 5), (5, 3), (4095, 0)], ids=str)
def test_row_5_row_7_numbers_of_tokens_that_are_no_multiple_of_anything(config, tokens):
    every_token_returns(config, tokens, 2)


@every_dispatcher
def test_row_11_all_choices_on_one_rank(config):
    """Counts are those of the choices, also where all but one are zero."""

    def on_rank(rank, groups):
        dispatcher = build_dispatcher(config, split_groups(rank, groups, 1, 2), 8)
        ids_TK = torch.full((1000 + rank, 1), 5)
        plan = dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=torch.ones(ids_TK.shape), num_experts=8))
        return plan.counts_E.tolist()

    assert run_threads(4, on_rank) == [[0, 0], [0, 0], [0, 4006], [0, 0]]


@pytest.mark.parametrize("config", [AllToAllConfig(), HybridConfig()], ids=lambda config: config.kind)
def test_row_16_24_ranks(config):
    every_token_returns(config, tuple(rank % 3 for rank in range(24)), 3)


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 3), (3, 1), (2, 3), (3, 2), (5, 1), (2, 4), (1, 1)])
def test_row_17_row_18_any_number_of_nodes_and_of_ranks_per_node(nodes, per_node):
    every_token_returns(HybridConfig(), tuple(3 + rank for rank in range(nodes * per_node)), nodes)


@every_dispatcher
def test_row_25_recompute_has_the_rows_of_the_forward_pass(config):
    """The plan is kept, so that what recompute saves has the same shapes, however often it runs."""
    shapes = [[] for _ in range(2)]

    def on_rank(rank, groups):
        dispatcher = build_dispatcher(config, split_groups(rank, groups, 1, 2), 4)
        x_TD, routing = inputs(rank, 5 + rank, 4)
        plan = dispatcher.plan(routing)

        def layer(x_TD, probs_TK):
            sent = dispatch(dispatcher, plan, x_TD, probs_TK)
            shapes[rank].append(tuple(sent.rows_RD.shape))
            return combine(dispatcher, plan, sent.rows_RD.square() * sent.probs_R[:, None])

        leaves = x_TD.requires_grad_(), routing.probs_TK.requires_grad_()
        checkpoint(layer, *leaves, use_reentrant=False, preserve_rng_state=False).sum().backward()
        torch.testing.assert_close(leaves[0].grad, 4 * x_TD.detach(), rtol=0, atol=0)

    run_threads(2, on_rank)
    assert [len(of_rank) for of_rank in shapes] == [2, 2]
    assert all(len(set(of_rank)) == 1 for of_rank in shapes)


@every_dispatcher
@pytest.mark.parametrize("row_multiple", [1, 16])
def test_row_27_what_the_host_knows_is_what_the_device_has(config, row_multiple):
    """One evaluation of the routing: the number of rows, the last offset and the rows that arrive agree."""

    def on_rank(rank, groups):
        dispatcher = build_dispatcher(config, split_groups(rank, groups, 1, 2), 12)
        x_TD, routing = inputs(rank, 17 + rank, 12, top_k=3)
        plan = dispatcher.plan(routing, Sizing(row_multiple=row_multiple))
        sent = dispatch(dispatcher, plan, x_TD, routing.probs_TK)
        assert plan.num_rows == int(plan.offsets_E[-1]) == len(sent.rows_RD)
        return int((sent.probs_R > 0).sum()), int(plan.counts_E.sum())

    results = run_threads(4, on_rank)
    assert all(arrived == counted for arrived, counted in results)


@every_dispatcher
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hidden", [1, 3, 2880, 3072, 7168])
def test_row_33_row_34_sizes_of_a_token(config, hidden, dtype):
    every_token_returns(config, (3, 2), 2, hidden=hidden, dtype=dtype)


@every_dispatcher
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_row_40_rows_are_padded_whatever_their_dtype(config, dtype):
    every_token_returns(config, (3, 8), 2, dtype=dtype, sizing=Sizing(row_multiple=128), experts_per_rank=2)


@every_dispatcher
def test_row_43_choices_of_the_same_expert_are_rows_of_their_own(config):
    def on_rank(rank, groups):
        dispatcher = build_dispatcher(config, split_groups(rank, groups, 1, 2), 4)
        ids_TK = torch.tensor([[3, 3, 0]])
        probs_TK = torch.tensor([[0.5, 0.25, 4.0]], requires_grad=True)
        plan = dispatcher.plan(Routing(ids_TK=ids_TK, probs_TK=probs_TK, num_experts=4))
        sent = dispatch(dispatcher, plan, torch.ones(1, 2), probs_TK)
        y_TD = combine(dispatcher, plan, sent.rows_RD * sent.probs_R[:, None])
        assert y_TD.tolist() == [[4.75, 4.75]]
        y_TD.sum().backward()
        assert probs_TK.grad.tolist() == [[2.0, 2.0, 2.0]]
        return sent.probs_R.tolist()

    assert run_threads(2, on_rank) == [[4.0, 4.0], [0.5, 0.25, 0.5, 0.25]]


@every_dispatcher
@pytest.mark.parametrize("sizing", [Sizing(), Sizing(capacity_rows=3)], ids=["exact", "static"])
def test_row_45_no_choices_per_token_are_none(config, sizing):
    every_token_returns(config, (3, 3), 2, top_k=0, sizing=sizing)


@every_dispatcher
def test_row_50_many_experts_per_rank(config):
    every_token_returns(config, (9, 4), 2, experts_per_rank=40, top_k=8)


def test_the_table_has_every_row_and_every_test_it_names():
    """A row is a test that has the row in its name or first lines, or a reason."""
    if not TABLE.exists():
        pytest.skip("the table is in the repository, not in the package")
    rows = re.findall(r"^\| (\d+) \| (.+?) \| (.+?) \|$", TABLE.read_text(), re.MULTILINE)
    assert [int(number) for number, _, _ in rows] == list(range(1, 52))
    for number, _, covered in rows:
        tests = re.findall(r"`(test_\w+\.py)::(test_\w+)`", covered)
        assert tests or covered.startswith("not applicable: "), f"row {number}: {covered}"
        for file, test in tests:
            source = (Path(__file__).parent / file).read_text()
            found = re.search(rf"^def {test}\(.*?(?=^def |^@|^class |\Z)", source, re.MULTILINE | re.DOTALL)
            assert found, f"row {number}: there is no {file}::{test}"
            words = rf"(?i)row_{number}_|\brows? (?:\d+, )*(?:\d+ and )?{number}\b"
            assert re.search(words, found[0]), f"{file}::{test} does not name row {number}"
