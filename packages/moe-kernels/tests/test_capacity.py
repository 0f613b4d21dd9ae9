"""Shape legend: T tokens, K choices, E experts."""

import math
from dataclasses import fields
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_kernels import (
    CapacityConfig,
    CapacityGroup,
    MoeKernelsError,
    RouterConfig,
    Routing,
    balance_loss,
    drop_beyond_capacity,
    expert_capacity,
    keep_choices,
    kept_choices,
    plain_choices,
    route,
    scores,
)
from moe_kernels.permute import permute_with_probs, row_map, unpermute
from moe_kernels.testing import ragged_ids

E = 5
POLICIES = ("probability", "position")


def routing_of(ids_TK: Tensor, probs_TK: Tensor | None = None) -> Routing:
    probs_TK = torch.rand(ids_TK.shape) if probs_TK is None else probs_TK
    return Routing(ids_TK=ids_TK, probs_TK=probs_TK.masked_fill(ids_TK < 0, 0), num_experts=E)


def kept_one_by_one(routing: Routing, most: int, policy: str) -> list[list[bool]]:
    """Written without tensors: every expert in turn admits choices in order of preference."""
    ids, probs = routing.ids_TK.tolist(), routing.probs_TK.tolist()
    kept = [[True] * len(row) for row in ids]
    for expert in range(routing.num_experts):
        choices = [(t, k) for t, row in enumerate(ids) for k, chosen in enumerate(row) if chosen == expert]
        if policy == "probability":
            choices.sort(key=lambda choice: -probs[choice[0]][choice[1]])
        for t, k in choices[most:]:
            kept[t][k] = False
    return kept


@pytest.mark.parametrize(
    ("tokens", "factor", "choices", "multiple", "expected"),
    [
        # ceil(T K / 2 factor), at most T, then up to a multiple
        (1, 0.5, 1, 1, 1),
        (7, 0.5, 1, 1, 2),
        (8, 0.5, 1, 1, 2),
        (9, 0.5, 1, 1, 3),
        (7, 1.0, 1, 1, 4),
        (9, 1.25, 1, 1, 6),
        (9, 1.25, 2, 1, 9),
        (8, 1.25, 1, 2, 6),
        (9, 1.0, 1, 2, 6),
        (9, 1.0, 2, 2, 10),
        (0, 1.0, 2, 2, 0),
    ],
)
def test_r039_the_capacity_is_rounded_up_and_then_aligned(
    tokens: int, factor: float, choices: int, multiple: int, expected: int
) -> None:
    assert expert_capacity(tokens, choices, 2, CapacityConfig(factor=factor), multiple=multiple) == expected


def test_r039_the_capacity_grows_with_the_factor() -> None:
    for tokens, choices, multiple in product((1, 7, 8, 9), (1, 2), (1, 2)):
        found = [
            expert_capacity(tokens, choices, 4, CapacityConfig(factor=factor), multiple=multiple)
            for factor in (0.1, 0.5, 1.0, 1.1, 1.25, 4.0)
        ]
        assert found == sorted(found)


def test_a_decimal_factor_is_taken_as_written() -> None:
    assert math.ceil(100 * 1.1) == 111
    assert expert_capacity(1000, 1, 10, CapacityConfig(factor=1.1)) == 110


@pytest.mark.parametrize(("tokens", "expected"), [(0, 0), (3, 3), (100, 8)])
def test_the_least_capacity_is_no_more_than_there_are_tokens(tokens: int, expected: int) -> None:
    assert expert_capacity(tokens, 1, 100, CapacityConfig(factor=0.5, min_capacity=8)) == expected


@pytest.mark.parametrize("tokens", [4, 1, 0])
def test_r035_a_capacity_above_the_number_of_tokens_drops_nothing(tokens: int) -> None:
    config = CapacityConfig(factor=4.0)
    assert expert_capacity(tokens, 1, 2, config) == tokens
    routing = routing_of(torch.zeros(tokens, 1, dtype=torch.int64))
    dropped = drop_beyond_capacity(routing, config)
    assert torch.equal(dropped.ids_TK, routing.ids_TK)
    assert torch.equal(dropped.probs_TK, routing.probs_TK)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dropped", [0.0, 0.3])
@pytest.mark.parametrize("factor", [0.2, 0.5, 0.7])
def test_each_expert_keeps_the_first_of_its_order(policy: Any, dropped: float, factor: float) -> None:
    ids_TK = ragged_ids(30, 3, E, seed=1, skew=0.7, dropped=dropped)
    # Few values, so that many are equal.
    routing = routing_of(ids_TK, torch.randint(1, 4, ids_TK.shape) / 4)
    most = expert_capacity(30, 3, E, CapacityConfig(factor=factor))
    expected = kept_one_by_one(routing, most, policy)
    assert kept_choices(routing, CapacityConfig(factor=factor, policy=policy)).tolist() == expected
    assert not all(map(all, expected))


def test_of_equal_weights_the_earlier_token_is_kept_and_a_weight_that_is_no_number_is_not() -> None:
    ids_TK = torch.zeros(5, 1, dtype=torch.int64)
    probs_TK = torch.tensor([0.5, math.nan, 0.7, 0.5, 0.5])[:, None]
    kept_TK = kept_choices(routing_of(ids_TK, probs_TK), CapacityConfig(factor=3.0))
    assert kept_TK.flatten().tolist() == [True, False, True, True, False]


def test_a_dropped_choice_adds_nothing_gets_no_gradient_and_leaves_the_other_weights() -> None:
    logits_TE = torch.randn(20, E, dtype=torch.float64)
    logits_TE[:, 0] += 3
    logits_TE.requires_grad_()
    routing = route(logits_TE, RouterConfig(top_k=2, normalize=False))
    kept = drop_beyond_capacity(routing, CapacityConfig(factor=0.75))
    lost_TK = kept.ids_TK < 0
    assert lost_TK.any()
    assert not lost_TK.all()
    assert not kept.probs_TK[lost_TK].any()
    assert torch.equal(kept.probs_TK[~lost_TK], routing.probs_TK[~lost_TK])
    x_TD = torch.randn(20, 4, dtype=torch.float64)
    layout = row_map(kept.ids_TK, E)
    rows_RD, probs_R = permute_with_probs(x_TD, kept.probs_TK, layout)
    y_TD = unpermute(rows_RD * probs_R[:, None], layout)
    by_hand_TD = x_TD * routing.probs_TK.masked_fill(lost_TK, 0).sum(-1, keepdim=True)
    torch.testing.assert_close(y_TD, by_hand_TD)
    (grad_TK,) = torch.autograd.grad(y_TD.square().sum(), routing.probs_TK, retain_graph=True)
    assert not grad_TK[lost_TK].any()
    assert grad_TK[~lost_TK].all()


@pytest.mark.parametrize("policy", POLICIES)
def test_r038_padding_tokens_take_no_place(policy: Any) -> None:
    logits_TE = torch.tensor([[9.0, 0, 0, 0, 0]]).repeat(4, 1)
    valid_T = torch.tensor([False, False, True, True])
    routing = route(logits_TE, RouterConfig(top_k=1, allow_constant_weight=True), valid_T=valid_T)
    config = CapacityConfig(factor=2.5, policy=policy)
    assert expert_capacity(4, 1, E, config) == 2
    kept = drop_beyond_capacity(routing, config)
    assert kept.ids_TK.flatten().tolist() == [-1, -1, 0, 0]
    layout = row_map(kept.ids_TK, E)
    assert layout.num_rows == 2
    y_TD = unpermute(permute_with_probs(torch.ones(4, 3), kept.probs_TK, layout)[0], layout)
    assert y_TD.sum(-1).tolist() == [0, 0, 3, 3]


@pytest.mark.parametrize(
    ("policy", "factor", "pad", "top_k"), list(product(POLICIES, (None, 0.5), (False, True), (1, 2, 4)))
)
def test_r037_every_policy_runs(policy: Any, factor: float | None, pad: bool, top_k: int) -> None:
    if factor is None and pad:
        with pytest.raises(MoeKernelsError, match="no effect without a factor"):
            drop_beyond_capacity(routing_of(ragged_ids(9, top_k, E, seed=2)), CapacityConfig(pad=True))
        return
    config = CapacityConfig(factor=factor, policy=policy, pad=pad)
    assert config.problems() == []
    kept = drop_beyond_capacity(routing_of(ragged_ids(9, top_k, E, seed=2, skew=1.0)), config)
    assert bool((kept.ids_TK < 0).any()) == (factor is not None)
    if pad:
        most = expert_capacity(9, top_k, E, config)
        layout = row_map(kept.ids_TK, E, rows_per_expert=most)
        assert layout.offsets_E.tolist() == [most * (e + 1) for e in range(E)]
        assert torch.equal(layout.counts_E, kept.counts_E())
        assert layout.overflow is not None
        assert not layout.overflow.any()


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"policy": "probs", "factor": 1.0}, "policy", "probability, position"),
        ({"scope": "world", "factor": 1.0}, "scope", "rank, microbatch"),
        ({"factor": 0.0}, "factor", "above 0"),
        ({"factor": math.inf}, "factor", "finite"),
        ({"factor": math.nan}, "factor", "finite"),
        ({"factor": 1.0, "min_capacity": -1}, "min_capacity", "at least 0"),
        ({"min_capacity": 4}, "min_capacity", "without a factor"),
        ({"pad": True}, "pad", "without a factor"),
    ],
)
def test_r037_what_is_wrong_is_named_with_what_is_legal(options: dict[str, Any], field: str, says: str) -> None:
    config = CapacityConfig(**options)
    assert [name for name, _ in config.problems()] == [field]
    with pytest.raises(MoeKernelsError, match=f"{field} = .*{says}"):
        drop_beyond_capacity(routing_of(torch.zeros(2, 1, dtype=torch.int64)), config)


def test_nothing_is_limited_by_default() -> None:
    assert CapacityConfig().problems() == []
    routing = routing_of(torch.zeros(9, 1, dtype=torch.int64))
    assert drop_beyond_capacity(routing, CapacityConfig()) is routing
    with pytest.raises(MoeKernelsError, match="drops nothing"):
        expert_capacity(9, 1, E, CapacityConfig())
    assert {field.name for field in fields(CapacityConfig)} == {"factor", "policy", "min_capacity", "scope", "pad"}


@pytest.mark.parametrize("policy", POLICIES)
def test_over_a_microbatch_the_layout_does_not_matter(policy: Any) -> None:
    ids_TK = ragged_ids(24, 2, E, seed=3, skew=0.5, dropped=0.1)
    # With few different weights, so that there are ties; fixed, because a rank alone may decide the same by luck.
    whole = routing_of(ids_TK, torch.randint(1, 4, ids_TK.shape, generator=torch.Generator().manual_seed(0)) / 4)
    config = CapacityConfig(factor=0.8, policy=policy, scope="microbatch")
    alone = CapacityConfig(factor=0.8, policy=policy)
    one = CapacityGroup(whole=lambda x: x, own=lambda x: x, num_tokens=24)
    expected_TK = kept_choices(whole, config, group=one)
    assert torch.equal(expected_TK, kept_choices(whole, alone))
    # As context parallelism deals them out: the first and the last quarter, and the two in between.
    shares = [torch.cat((torch.arange(6), torch.arange(18, 24))), torch.arange(6, 18)]
    parts = [routing_of(ids_TK[share], whole.probs_TK[share]) for share in shares]
    for part, share in zip(parts, shares, strict=True):
        others = {id(part.ids_TK): whole.ids_TK, part.probs_TK.data_ptr(): whole.probs_TK}

        def gather(x: Tensor, others: Any = others) -> Tensor:
            found: Tensor = others[id(x) if not x.is_floating_point() else x.data_ptr()]
            return found

        group = CapacityGroup(whole=gather, own=lambda x, share=share: x[share], num_tokens=24)
        assert torch.equal(kept_choices(part, config, group=group), expected_TK[share])
    assert any(
        not torch.equal(kept_choices(part, alone), expected_TK[share])
        for part, share in zip(parts, shares, strict=True)
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_that_rows_were_padded_with_do_not_raise_the_capacity(policy: Any) -> None:
    """Rows of 5 slots, padded to 8 so that ranks can split them."""
    ids_TK = torch.zeros(2, 5, 1, dtype=torch.int64)
    probs_TK = torch.rand(2, 5, 1)
    config = CapacityConfig(factor=2.5, policy=policy, scope="microbatch")
    kept_TK = kept_choices(
        routing_of(ids_TK.flatten(0, 1), probs_TK.flatten(0, 1)),
        config,
        group=CapacityGroup(whole=lambda x: x, own=lambda x: x, num_tokens=10),
    )
    more = (0, 0, 0, 3)
    padded = routing_of(
        torch.nn.functional.pad(ids_TK, more, value=-1).flatten(0, 1),
        torch.nn.functional.pad(probs_TK, more).flatten(0, 1),
    )
    group = CapacityGroup(whole=lambda x: x, own=lambda x: x, num_tokens=10)
    again_TK = kept_choices(padded, config, group=group).view(2, 8, 1)[:, :5].flatten(0, 1)
    assert torch.equal(again_TK, kept_TK)
    assert kept_TK.sum() == 5


def test_a_microbatch_needs_its_ranks() -> None:
    with pytest.raises(MoeKernelsError, match="pass their group"):
        kept_choices(routing_of(ragged_ids(4, 2, E, seed=4)), CapacityConfig(factor=1.0, scope="microbatch"))


def test_r012_padding_and_dropping_leave_the_balance_loss_as_it_is() -> None:
    logits_TE = torch.randn(40, E)
    logits_TE[:, 0] += 2
    scores_TE = scores(logits_TE, "softmax")
    routing = route(logits_TE, RouterConfig(top_k=1, normalize=False))
    kept = drop_beyond_capacity(routing, CapacityConfig(factor=1.0, pad=True))
    assert (kept.counts_E() <= 8).all()
    ids_TK = plain_choices(scores_TE, 1)
    assert torch.equal(ids_TK, routing.ids_TK)
    microbatch_T = torch.zeros(40, dtype=torch.int64)
    loss_M = balance_loss(scores_TE, ids_TK, microbatch_T, 1)
    assert loss_M.item() > 1
    assert not torch.allclose(balance_loss(scores_TE, kept.ids_TK, microbatch_T, 1), loss_M)


def test_recorded_choices_are_kept_again() -> None:
    routing = routing_of(ragged_ids(10, 2, E, seed=5))
    kept_TK = kept_choices(routing, CapacityConfig(factor=0.5))
    again = keep_choices(routing, kept_TK)
    first = drop_beyond_capacity(routing, CapacityConfig(factor=0.5))
    assert torch.equal(again.ids_TK, first.ids_TK)
    assert torch.equal(again.probs_TK, first.probs_TK)
