"""Dispatch and combine as operators: equal to the steps bit for bit, checked by torch, with no plans left behind."""

import gc

import pytest
import torch
from torch.library import opcheck

from moe_comm import (
    EXACT,
    AllGatherConfig,
    AllToAllConfig,
    HybridConfig,
    LocalConfig,
    MoeCommError,
    Sizing,
    build_dispatcher,
    combine,
    dispatch,
    record_traffic,
)
from moe_comm.operators import live_plans, register
from moe_comm.testing.harness import split_groups
from moe_kernels import Routing
from moe_parallel import AxisGroups
from moe_parallel.testing import run_threads

ops = torch.ops.moe_comm
LOCAL_EXPERTS, TOP_K = 3, 3


def layer_of_operators(name, x_TD, probs_TK, ids_TK, num_experts, sizing=EXACT):
    plan, *_ = ops.plan(ids_TK, num_experts, name, sizing.row_multiple, sizing.capacity_rows, sizing.most_tokens)
    rows_RD, probs_R = ops.dispatch(x_TD, probs_TK, plan, name, sizing.capacity_rows)
    return ops.combine(rows_RD.sin() * probs_R[:, None], plan, name, len(x_TD))


def inputs(rank, num_tokens, num_experts, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    ids_TK = torch.randint(-1, num_experts, (num_tokens, TOP_K), generator=generator)
    x_TD = torch.randn(num_tokens, 4, generator=generator, dtype=dtype).requires_grad_()
    probs_TK = torch.rand(num_tokens, TOP_K, generator=generator, dtype=dtype).requires_grad_()
    return ids_TK, x_TD, probs_TK, torch.randn(num_tokens, 4, generator=generator, dtype=dtype)


@pytest.fixture
def local():
    dispatcher = build_dispatcher(LocalConfig(), AxisGroups(), 4)
    return register(dispatcher), dispatcher


@pytest.mark.parametrize("sizing", [EXACT, Sizing(capacity_rows=7, most_tokens=9, overflow="drop")], ids=["exact", "7"])
@pytest.mark.parametrize(
    ("config", "etp", "ep", "nodes"),
    [
        (LocalConfig(), 1, 1, 1),
        (AllToAllConfig(), 2, 2, 1),
        (AllToAllConfig(row="per_expert"), 1, 3, 1),
        (AllGatherConfig(), 1, 3, 1),
        (HybridConfig(lanes=2), 1, 4, 2),
        (HybridConfig(rail="allgather"), 2, 2, 2),
    ],
    ids=lambda value: value.kind if hasattr(value, "kind") else None,
)
def test_operators_equal_the_steps(config, etp, ep, nodes, sizing):
    """Output, gradients, and the bytes that were sent for them."""
    num_experts = LOCAL_EXPERTS * ep

    def on_rank(rank, groups):
        dispatcher = build_dispatcher(config, split_groups(rank, groups, etp, nodes), num_experts)
        name = register(dispatcher)
        ids_TK, x_TD, probs_TK, grad_TD = inputs(rank, (5, 0, 7, 3)[rank], num_experts)
        with record_traffic() as steps:
            routing = Routing(ids_TK=ids_TK, probs_TK=probs_TK.detach(), num_experts=num_experts)
            plan = dispatcher.plan(routing, sizing)
            sent = dispatch(dispatcher, plan, x_TD, probs_TK)
            y_TD = combine(dispatcher, plan, sent.rows_RD.sin() * sent.probs_R[:, None])
            expected = [y_TD, *torch.autograd.grad(y_TD, (x_TD, probs_TK), grad_TD)]
        with record_traffic() as operators:
            y_TD = layer_of_operators(name, x_TD, probs_TK, ids_TK, num_experts, sizing)
            got = [y_TD, *torch.autograd.grad(y_TD, (x_TD, probs_TK), grad_TD)]
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one, other)
        sent_bytes = [[(entry.leg, entry.sent_bytes) for entry in ledger.entries] for ledger in (steps, operators)]
        assert sent_bytes[1] == sent_bytes[0]
        return float(expected[1].abs().sum())

    assert sum(run_threads(etp * ep, on_rank)) > 1
    gc.collect()
    assert live_plans() == 0


def test_torch_checks_the_operators(local):
    name, _ = local
    ids_TK, x_TD, probs_TK, _ = inputs(0, 5, 4)
    plan, *_ = ops.plan(ids_TK, 4, name)
    opcheck(
        ops.plan.default, (ids_TK, 4, name), test_utils=("test_schema", "test_autograd_registration", "test_faketensor")
    )
    opcheck(ops.dispatch.default, (x_TD, probs_TK, plan, name))
    rows_RD, probs_R = ops.dispatch(x_TD, probs_TK, plan, name)
    opcheck(ops.combine.default, (rows_RD.detach().requires_grad_(), plan, name, 5))
    opcheck(ops.dispatch_backward.default, (rows_RD.detach(), probs_R.detach(), plan, name, 5, TOP_K))
    opcheck(ops.combine_backward.default, (x_TD.detach(), plan, name, len(rows_RD)))


def test_one_row_per_token_is_not_the_input_again(local):
    """A token with one choice comes back as it is; what an operator returns is still its own memory."""
    name, _ = local
    plan, *_ = ops.plan(torch.tensor([[0], [1], [3]]), 4, name)
    rows_RD = torch.randn(3, 4)
    assert ops.combine(rows_RD, plan, name, 3).data_ptr() != rows_RD.data_ptr()
    opcheck(ops.combine.default, (rows_RD, plan, name, 3), test_utils="test_schema")


@pytest.mark.parametrize("sizing", [EXACT, Sizing(capacity_rows=12, overflow="drop")], ids=["exact", "12 rows"])
def test_a_layer_compiles_as_one_graph(local, sizing):
    name, _ = local
    ids_TK, x_TD, probs_TK, grad_TD = inputs(1, 5, 4)

    def run(x_TD, probs_TK):
        return layer_of_operators(name, x_TD, probs_TK, ids_TK, 4, sizing)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=sizing.capacity_rows is None)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        y_TD = compiled(x_TD, probs_TK)
        got = [y_TD, *torch.autograd.grad(y_TD, (x_TD, probs_TK), grad_TD)]
    y_TD = run(x_TD, probs_TK)
    for one, other in zip(got, [y_TD, *torch.autograd.grad(y_TD, (x_TD, probs_TK), grad_TD)], strict=True):
        assert torch.equal(one, other)


def test_row_28_plans_live_as_long_as_their_tensor(local):
    """Also while the autograd graph alone holds it; nothing is left after a hundred steps."""
    name, _ = local
    ids_TK, x_TD, probs_TK, grad_TD = inputs(2, 5, 4)
    assert live_plans() == 0
    for step in range(100):
        y_TD = layer_of_operators(name, x_TD, probs_TK, ids_TK, 4)
        if step % 25 == 0:  # a third of a second where many tests ran before
            gc.collect()
            assert live_plans() == 1
        y_TD.backward(grad_TD)
        del y_TD
    gc.collect()
    assert live_plans() == 0


def test_what_is_gone_or_strange_is_refused(local):
    name, _ = local
    ids_TK, x_TD, probs_TK, _ = inputs(3, 5, 4)
    plan, *_ = ops.plan(ids_TK, 4, name)
    with pytest.raises(MoeCommError, match="no plan of"):
        ops.dispatch(x_TD, probs_TK, torch.tensor(-1), name)
    with pytest.raises(MoeCommError, match="no dispatcher is registered as 'nobody'"):
        ops.dispatch(x_TD, probs_TK, plan, "nobody")
    with pytest.raises(MoeCommError, match=r"made for \d+ rows, not for capacity_rows = 3"):
        ops.dispatch(x_TD, probs_TK, plan, name, 3)
    gone = register(build_dispatcher(LocalConfig(), AxisGroups(), 4))
    gc.collect()
    with pytest.raises(MoeCommError, match="or it is gone"):
        ops.plan(ids_TK, 4, gone)
    with pytest.raises(MoeCommError, match="object cannot be used through operators: it has no dispatch_backward"):
        register(object())
