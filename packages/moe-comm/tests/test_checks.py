"""What every dispatcher refuses, and in which words."""

from dataclasses import replace

import pytest
import torch

from moe_comm import EXACT, Capabilities, MoeCommError, Plan, Sizing, check_routing, check_tokens, wrong_ids
from moe_kernels import Routing

CAPABILITIES = Capabilities(dtypes=frozenset({torch.float32, torch.bfloat16}), largest_top_k=2, hidden_multiple=4)
GOOD = Routing(ids_TK=torch.tensor([[0, 3], [-1, 2]]), probs_TK=torch.ones(2, 2), num_experts=4)
PLAN = Plan(
    num_tokens=2,
    num_choices=2,
    num_local_experts=4,
    num_rows=3,
    counts_E=torch.tensor([1, 0, 1, 1]),
    offsets_E=torch.tensor([1, 1, 2, 3], dtype=torch.int32),
    overflow=torch.tensor(0),
)


def check(routing, sizing=EXACT, num_experts=4, capabilities=CAPABILITIES):
    check_routing(routing, sizing, num_experts=num_experts, capabilities=capabilities)


def test_a_good_routing_passes():
    check(GOOD)
    check(GOOD, Sizing(row_multiple=8))
    check(replace(GOOD, probs_TK=GOOD.probs_TK.double()))
    check(GOOD, Sizing(capacity_rows=8), capabilities=replace(CAPABILITIES, static_shapes=True))
    check(Routing(ids_TK=torch.empty(0, 2, dtype=torch.int64), probs_TK=torch.empty(0, 2), num_experts=4))


@pytest.mark.parametrize(
    ("change", "sizing", "message"),
    [
        ({"num_experts": 8}, EXACT, "over 8 experts, the dispatcher was built for 4"),
        ({"ids_TK": GOOD.ids_TK.int()}, EXACT, "int64 of shape .* not torch.int32"),
        ({"ids_TK": GOOD.ids_TK[0]}, EXACT, r"not torch.int64 of shape \(2,\)"),
        ({"probs_TK": torch.ones(2, 1)}, EXACT, r"shape and device of the ids, \(2, 2\) .* not \(2, 1\)"),
        ({"probs_TK": torch.ones(2, 2).half()}, EXACT, "not torch.float16"),
        ({"probs_TK": torch.ones(2, 2).long()}, EXACT, "not torch.int64"),
        (
            {"ids_TK": torch.zeros(2, 3).long(), "probs_TK": torch.ones(2, 3)},
            EXACT,
            "3 choices per token, .* at most 2",
        ),
        ({}, Sizing(row_multiple=0), "a multiple of at least 1, not 0"),
        ({}, Sizing(capacity_rows=64), "cannot keep to 64 rows; leave capacity_rows out"),
    ],
)
def test_a_malformed_routing_is_refused(change, sizing, message):
    """Row 37: what has no static shapes refuses a fixed size at once."""
    with pytest.raises(MoeCommError, match=message):
        check(replace(GOOD, **change), sizing)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([[0, 3]], None),
        ([[-1, -1]], None),
        ([[0, 4]], "expert id 4 is out of range; legal are -1 .* and 0 to 3"),
        ([[-2, 9]], "expert id -2 is out of range"),
    ],
)
def test_ids_out_of_range_are_reported(ids, message):
    found = wrong_ids(Routing(ids_TK=torch.tensor(ids), probs_TK=torch.ones(1, 2), num_experts=4))
    if message is None:
        assert found is None
    else:
        with pytest.raises(MoeCommError, match=message):
            raise MoeCommError(found)


def test_no_tokens_have_no_wrong_ids():
    empty = Routing(ids_TK=torch.empty(0, 2, dtype=torch.int64), probs_TK=torch.empty(0, 2), num_experts=4)
    assert wrong_ids(empty) is None


def test_good_tokens_pass():
    check_tokens(PLAN, torch.ones(2, 8), torch.ones(2, 2), CAPABILITIES)
    check_tokens(PLAN, torch.ones(2, 4).bfloat16(), torch.ones(2, 2).double(), CAPABILITIES)


@pytest.mark.parametrize(
    ("x_TD", "probs_TK", "message"),
    [
        (torch.ones(3, 8), torch.ones(2, 2), r"for 2 tokens .* not \(3, 8\)"),
        (torch.ones(2, 8, 1), torch.ones(2, 2), r"not \(2, 8, 1\)"),
        (torch.ones(2, 8), torch.ones(2, 3), r"probabilities of shape \(2, 2\), not \(2, 3\)"),
        (torch.ones(2, 8).half(), torch.ones(2, 2), "torch.float16; legal here: torch.bfloat16, torch.float32"),
        (torch.ones(2, 6), torch.ones(2, 2), "6 features per token, .* a multiple of 4"),
        (torch.ones(2, 8), torch.ones(2, 2).bfloat16(), "not torch.bfloat16"),
        (torch.ones(2, 8, device="meta"), torch.ones(2, 2), r"tokens \(meta\), probabilities \(cpu\)"),
    ],
)
def test_tokens_that_do_not_fit_are_refused(x_TD, probs_TK, message):
    """Row 46."""
    with pytest.raises(MoeCommError, match=message):
        check_tokens(PLAN, x_TD, probs_TK, CAPABILITIES)
