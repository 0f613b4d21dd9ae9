"""Experts split over `etp` ranks: the layer of one rank, in parts, and what only exists where experts are shared.

Router, dispatch, gated experts and combine on the etp x ep block must equal the layer of one rank with all tokens and
whole experts, in float64 to 1e-12. Ranks are threads; `test_expert_tensor_processes.py` has them on gloo.
"""

from dataclasses import replace

import pytest
import torch

from moe_comm import AllToAllConfig, MoeCommError, Parcel, build_dispatcher, combine, dispatch
from moe_comm.hops import Hop
from moe_comm.journey import Journey
from moe_comm.local import LocalDispatcher
from moe_comm.testing.harness import split_groups
from moe_kernels import GroupedExperts, RouterConfig, Routing, route, select_grouped_gemm
from moe_parallel import AxisGroups
from moe_parallel.testing import run_threads

HIDDEN, FFN, SHARE = 5, 6, 2
RESULTS = ("output", "tokens", "probabilities", "gate", "w1", "w2")


def run_block(etp, ep, fn):
    """`fn(rank, groups)` on a block of threads, etp fastest."""
    return run_threads(etp * ep, lambda rank, groups: fn(rank, split_groups(rank, groups, etp)), timeout_s=20)


def normal(seed, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer(dispatcher, x_TD, gate_DE, weights, probs_on, grad_TD, forced_TK):
    """Output, then gradients of tokens, probabilities, gate and weights."""
    x_TD, gate_DE = x_TD.clone().requires_grad_(), gate_DE.clone().requires_grad_()
    backend = select_grouped_gemm("loop", torch.float64, "cpu")
    w1_ED2F, _ = weights
    local_experts, _, _, features = w1_ED2F.shape
    experts = GroupedExperts(local_experts, HIDDEN, features, probs_on=probs_on, backend=backend, dtype=torch.float64)
    for parameter, weight in zip(experts.parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    routing = route(x_TD @ gate_DE, RouterConfig(top_k=2, normalize=False), ids_TK=forced_TK)
    routing.probs_TK.retain_grad()
    plan = dispatcher.plan(routing)
    sent = dispatch(dispatcher, plan, x_TD, routing.probs_TK)
    y_TD = combine(dispatcher, plan, experts(sent.rows_RD, sent.probs_R, sent.offsets_E))
    y_TD.backward(grad_TD)
    grads = [x_TD.grad, routing.probs_TK.grad, gate_DE.grad, *(parameter.grad for parameter in experts.parameters())]
    assert all(grad is not None for grad in grads), "a gradient of zero is not an absent one"
    return [y_TD.detach(), *grads]


def assert_equal_to_one_rank(etp, ep, tokens, probs_on="activation", forced=None):
    """On the block and on one rank, all of output and gradients; returns those of one rank."""
    num_experts, total = SHARE * ep, sum(tokens)
    x_TD, gate_DE, grad_TD = normal(1, total, HIDDEN), normal(2, HIDDEN, num_experts), normal(3, total, HIDDEN)
    weights = [normal(4, num_experts, HIDDEN, 2, FFN) / 2, normal(5, num_experts, FFN, HIDDEN) / 2]
    forced_TK = None if forced is None else torch.tensor([forced] * total).view(total, 2)

    def on_rank(rank, groups):
        dispatcher = build_dispatcher(AllToAllConfig(), groups, num_experts)
        mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
        shard, local = rank % etp, slice(rank // etp * SHARE, (rank // etp + 1) * SHARE)
        inner = slice(shard * FFN // etp, (shard + 1) * FFN // etp)
        parts = [weights[0][local, :, :, inner], weights[1][local, inner]]
        forced = None if forced_TK is None else forced_TK[mine]
        return layer(dispatcher, x_TD[mine], gate_DE, parts, probs_on, grad_TD[mine], forced)

    results = [dict(zip(RESULTS, values, strict=True)) for values in run_block(etp, ep, on_rank)]
    expected = layer(LocalDispatcher(num_experts), x_TD, gate_DE, weights, probs_on, grad_TD, forced_TK)
    for name, want in zip(RESULTS, expected, strict=True):
        parts = [result[name] for result in results]
        if name == "gate":
            got = sum(parts)
        elif name in ("w1", "w2"):
            inner_dim = 3 if name == "w1" else 1
            places = [torch.cat(parts[first : first + etp], inner_dim) for first in range(0, etp * ep, etp)]
            got = torch.cat(places)
        else:
            got = torch.cat(parts)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    return expected


@pytest.mark.parametrize("probs_on", ["activation", "output"])
@pytest.mark.parametrize("etp", [1, 2, 3])
def test_r060_gradients_do_not_depend_on_where_probabilities_are_applied_or_on_etp(etp, probs_on):
    """Each rank that shares an expert has a part of the gradient of tokens and probabilities; the sum comes home."""
    expected = assert_equal_to_one_rank(etp, 2, tuple(3 + 2 * rank for rank in range(2 * etp)), probs_on)
    assert all(value.abs().max() > 1e-2 for value in expected)


@pytest.mark.parametrize(("etp", "ep"), [(2, 1), (3, 1), (2, 3), (3, 2)])
def test_r043_layouts_whose_degrees_differ(etp, ep):
    assert_equal_to_one_rank(etp, ep, tuple((5, 1, 8, 0, 3, 2)[: etp * ep]))


@pytest.mark.parametrize("tokens", [(0, 6, 3, 1), (6, 0, 3, 1), (0, 0, 0, 5), (4, 0, 0, 0), (0, 0, 0, 0)])
def test_r051_ranks_without_tokens_take_part(tokens):
    assert_equal_to_one_rank(2, 2, tokens)


@pytest.mark.parametrize("forced", [(0, 1), (2, 3), (0, 2)])
def test_r051_experts_that_nobody_chose_have_zero_gradients(forced):
    *_, grad_w1, grad_w2 = assert_equal_to_one_rank(2, 2, (4, 3, 0, 2), forced=forced)
    for grad in (grad_w1, grad_w2):
        assert [bool(expert.any()) for expert in grad] == [expert in forced for expert in range(4)]


def test_r051_no_choice_at_all():
    expected = assert_equal_to_one_rank(2, 2, (4, 3, 0, 2), forced=(-1, -1))
    assert not any(value.any() for value in expected)


def shared(group, counts):
    """The journey of rows that all ranks get; `counts` are those of each."""
    mine = (counts[group.rank()],) * len(counts)
    hop = Hop(group=group, there="gather", back="scatter", reach=None, send_rows=mine, receive_rows=tuple(counts))
    return Journey(((hop,),))


def there(journey, x):
    return journey.there(Parcel(rows=x, probs=x[:, :1]), lambda ids_CK: None).wait()


@pytest.mark.parametrize("counts", [(2, 3), (4, 0, 1), (0, 0), (2, 2)])
def test_gather_and_sum_are_adjoint(counts):
    """<gather(x), y> = <x, sum(y)>, and each one's backward is the other; exact on whole numbers."""

    def on_rank(rank, groups):
        journey = shared(groups.group("world"), counts)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randint(-4, 5, (counts[rank], 3), generator=generator).double().requires_grad_()
        y = torch.randint(-4, 5, (sum(counts), 3), generator=generator).double().requires_grad_()
        rows = there(journey, x)
        back = journey.back(Parcel(rows=y)).wait().rows
        assert torch.equal(rows.rows[:, :1], rows.probs)
        assert rows.rows.shape == y.shape
        assert back.shape == x.shape
        (grad_x,) = torch.autograd.grad(rows.rows, x, y.detach(), retain_graph=True)
        assert torch.equal(grad_x, back)
        (grad_y,) = torch.autograd.grad(back, y, x.detach())
        assert torch.equal(grad_y, rows.rows)
        return rows.rows.detach(), float((rows.rows * y).detach().sum()), float((x * back).detach().sum())

    rows, ahead, back = zip(*run_threads(len(counts), on_rank), strict=True)
    assert sum(ahead) == sum(back)
    assert all(torch.equal(other, rows[0]) for other in rows), "the same bits on every rank"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parts_are_added_up_in_the_internal_dtype_and_rounded_once(dtype):
    """1 and five times half a unit in the last place: one after the other in the row dtype each would round to 1.

    Row 32.
    """
    half = torch.finfo(dtype).eps / 2

    def on_rank(rank, groups):
        journey = shared(groups.group("world"), (1,) * 6)
        part = torch.full((6, 1), 1.0 if rank == 0 else half, dtype=dtype).requires_grad_()
        total = journey.back(Parcel(rows=part)).wait().rows
        x = torch.ones(1, 1, dtype=dtype, requires_grad=True)
        probs = torch.ones(1, 1)
        arrived = journey.there(Parcel(rows=x, probs=probs), lambda ids_CK: None).wait()
        arrived.rows.backward(part.detach())
        return [float(total.detach()), float(x.grad)]

    expected = float(torch.tensor(1 + 5 * half, dtype=torch.float64).to(dtype))
    assert expected > 1
    assert run_threads(6, on_rank) == [[expected, expected]] * 6


@pytest.mark.parametrize(("etp", "ep"), [(2, 1), (2, 2), (3, 2)])
@pytest.mark.parametrize("culprit", [0, -1])
def test_an_id_out_of_range_is_named_on_every_rank_of_the_block(etp, ep, culprit):
    culprit %= etp * ep

    def on_rank(rank, groups):
        ids_TK = torch.tensor([[0, 1]])
        routing = Routing(ids_TK=ids_TK, probs_TK=torch.rand(1, 2), num_experts=2 * ep)
        bad = replace(routing, ids_TK=ids_TK + 77) if rank == culprit else routing
        dispatcher = build_dispatcher(AllToAllConfig(), groups, 2 * ep)
        with pytest.raises(MoeCommError, match=rf"^rank {culprit}: expert id 78 is out of range; [^;]*$"):
            dispatcher.plan(bad)
        return dispatcher.plan(routing).num_rows  # nobody is left behind in a collective

    assert run_block(etp, ep, on_rank) == [2 * etp * ep] * etp + [0] * (etp * (ep - 1))


def test_backward_sends_every_tensor_on_every_rank():
    """One rank wants the gradient of its tokens alone, the others those of their probabilities."""

    def on_rank(rank, groups):
        dispatcher = build_dispatcher(AllToAllConfig(), groups, 4)
        x_TD = torch.ones(2, 3, dtype=torch.float64, requires_grad=rank == 0)
        probs_TK = torch.ones(2, 1, dtype=torch.float64, requires_grad=rank != 0)
        plan = dispatcher.plan(Routing(ids_TK=torch.tensor([[0], [3]]), probs_TK=probs_TK, num_experts=4))
        sent = dispatch(dispatcher, plan, x_TD, probs_TK)
        weight = torch.ones((), dtype=torch.float64, requires_grad=True)
        combine(dispatcher, plan, sent.rows_RD * sent.probs_R[:, None] * weight).sum().backward()
        return None if x_TD.grad is None else x_TD.grad.tolist(), probs_TK.grad is None, float(weight.grad)

    results = run_block(2, 2, on_rank)
    assert results[0][0] == [[2.0] * 3] * 2, "once from each rank that shares the expert"
    assert [result[0] is None for result in results] == [False, True, True, True]
    assert [result[1] for result in results] == [True, False, False, False]
    assert {result[2] for result in results} == {12.0}


def test_a_second_leg_that_has_not_started_is_not_done():
    def on_rank(rank, groups):
        dispatcher = build_dispatcher(AllToAllConfig(), groups, 2)
        probs_TK = torch.ones(1, 1)
        plan = dispatcher.plan(Routing(ids_TK=torch.tensor([[0]]), probs_TK=probs_TK, num_experts=2))
        pending = dispatcher.exchange(plan, dispatcher.prepare(plan, torch.ones(1, 2), probs_TK))
        before = pending.done()
        pending.wait()
        return before, pending.done()

    assert run_block(2, 2, on_rank) == [(False, True)] * 4


def test_groups_without_the_block_are_refused():
    def on_rank(rank, groups):
        inner = split_groups(rank, groups, 2)
        axes = AxisGroups({"etp": inner.group("etp"), "ep": inner.group("ep")})
        with pytest.raises(ValueError, match="no process group was given that spans the axes etp, ep"):
            build_dispatcher(AllToAllConfig(), axes, 4)

    run_threads(4, on_rank)
