"""The kit's own expectations, against numbers worked out by hand, and that its cases cover what they claim."""

from dataclasses import replace

import pytest
import torch

from moe_comm import Dispatched, MoeCommError, Plan
from moe_comm.testing.cases import PATTERNS, Case, Inputs, edge_cases, few_cases, random_cases
from moe_comm.testing.reference import Row, apply_experts, dense_reference, expected_rows
from moe_comm.testing.static import capacities, fixed, most_rows, real_rows
from moe_comm.testing.verdict import close, refused, require, same


def test_expected_rows_by_hand(monkeypatch):
    # Two ranks, two experts each; rank 0 has tokens [3, 0] and [1, 1], rank 1 has token [0, -1].
    ids = [torch.tensor([[3, 0], [1, 1]]), torch.tensor([[0, -1]])]
    case = Case(name="by hand", tokens=(2, 1), local_experts=2)
    monkeypatch.setattr(Case, "inputs", lambda self, rank: _given(ids[rank]))
    assert expected_rows(case, 0) == [
        [Row(0, 0, 1), Row(1, 0, 0)],
        [Row(0, 1, 0), Row(0, 1, 1)],
    ]
    assert expected_rows(case, 1) == [[], [Row(0, 0, 0)]]


def test_expected_rows_where_experts_are_split_by_hand(monkeypatch):
    # One expert at each of two places, shared by two ranks; the four ranks have a token each.
    ids = [torch.tensor([[1]]), torch.tensor([[0]]), torch.tensor([[0]]), torch.tensor([[1]])]
    case = Case(name="by hand", tokens=(1, 1, 1, 1), etp=2, local_experts=1, top_k=1)
    monkeypatch.setattr(Case, "inputs", lambda self, rank: _given(ids[rank]))
    assert case.num_experts == 2
    assert expected_rows(case, 0) == expected_rows(case, 1) == [[Row(1, 0, 0), Row(2, 0, 0)]]
    assert expected_rows(case, 2) == expected_rows(case, 3) == [[Row(0, 0, 0), Row(3, 0, 0)]]


def test_shares_sum_to_one_and_differ():
    for etp in (1, 2, 3, 4):
        case = Case(name="shares", tokens=(1,) * (2 * etp), etp=etp)
        shares = [case.share(rank) for rank in range(2 * etp)]
        assert shares[:etp] == shares[etp:]
        assert len(set(shares[:etp])) == etp
        assert sum(shares[:etp]) == 1


def test_edge_cases_of_a_block():
    for case in [
        *edge_cases((2, 3), hidden=6, largest_top_k=None),
        *random_cases((2, 3), 5, hidden=6, largest_top_k=8),
    ]:
        assert (case.etp, case.world) == (2, 6)
        assert case.num_experts == 3 * case.local_experts
        assert all((case.inputs(rank).ids_TK < case.num_experts).all() for rank in range(6))


def _given(ids_TK):
    x_TD = torch.ones(len(ids_TK), 1, dtype=torch.float64)
    return Inputs(x_TD=x_TD, ids_TK=ids_TK, probs_TK=torch.ones(ids_TK.shape).double(), grad_TD=x_TD, num_experts=4)


def test_dense_reference_by_hand(monkeypatch):
    # One token x = 2 with probabilities 3 and 5 for experts 1 and 0, one choice none; matrices 7 and 11, gradient 1.
    given = Inputs(
        x_TD=torch.tensor([[2.0]], dtype=torch.float64),
        ids_TK=torch.tensor([[1, 0, -1]]),
        probs_TK=torch.tensor([[3.0, 5.0, 13.0]], dtype=torch.float64),
        grad_TD=torch.ones(1, 1, dtype=torch.float64),
        num_experts=2,
    )
    case = Case(name="by hand", tokens=(1,), local_experts=2, top_k=3, hidden=1)
    monkeypatch.setattr(Case, "inputs", lambda self, rank: given)
    monkeypatch.setattr(Case, "experts", lambda self: torch.tensor([7.0, 11.0], dtype=torch.float64).view(2, 1, 1))
    expected = dense_reference(case)
    assert expected.y_TD[0].tolist() == [[2.0 * (3 * 11 + 5 * 7)]]
    assert expected.grad_x_TD[0].tolist() == [[3.0 * 11 + 5 * 7]]
    assert expected.grad_probs_TK[0].tolist() == [[22.0, 14.0, 0.0]]
    assert expected.grad_experts_EDD.flatten().tolist() == [10.0, 6.0]


def test_experts_are_applied_to_their_rows():
    rows_RD = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    matrices = torch.tensor([10.0, 100.0, 1000.0]).view(3, 1, 1)
    assert apply_experts(rows_RD, [1, 1, 3], matrices).flatten().tolist() == [10.0, 2000.0, 3000.0, 0.0]


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_edge_cases_cover_the_list(world):
    cases = {case.name: case for case in edge_cases(world, hidden=6, largest_top_k=None)}
    ids = {name: [case.inputs(rank).ids_TK for rank in range(world)] for name, case in cases.items()}
    together = {name: torch.cat(parts) for name, parts in ids.items()}
    assert {len(part) for part in ids["uniform"]} == {65, 1, 63, 15} or world < 4
    assert together["one choice"].shape[1] == 1
    assert together["every expert"].sort(1).values.tolist() == [list(range(3 * world))] * len(together["every expert"])
    assert cases["one expert per rank"].num_experts == world
    assert together["all to one expert"].unique().numel() == 1
    unused = together["one rank's experts unused"]
    assert unused.max() < max(1, 3 * world - 3)
    assert any(len(set(row)) < 5 for row in together["duplicates"].tolist())
    assert (together["no choice at all"] == -1).all()
    none = together["every other choice is none"] == -1
    assert (none[:, :-1] ^ none[:, 1:]).all()
    assert 0.2 < (together["a third of the choices is none"] == -1).double().mean() < 0.5
    assert cases["no tokens anywhere"].tokens == (0,) * world
    assert cases["no tokens on the first rank"].tokens[0] == 0
    assert cases["tokens on the last rank only"].tokens == (0,) * (world - 1) + (7,)
    for name, parts in ids.items():
        for part in parts:
            assert part.dtype == torch.int64
            assert part.shape[1] == cases[name].top_k
            assert part.numel() == 0 or (int(part.min()) >= -1 and int(part.max()) < cases[name].num_experts)
    assert len(few_cases(list(cases.values()))) == 7


def test_limits_of_a_dispatcher_are_respected():
    assert all(case.top_k <= 2 for case in edge_cases(3, hidden=6, largest_top_k=2))
    assert all(case.top_k <= 1 for case in random_cases(2, 10, hidden=6, largest_top_k=1))


def test_random_cases_are_the_same_every_time_and_differ_from_each_other():
    cases = list(random_cases(3, 30, hidden=6, largest_top_k=None))
    assert cases == list(random_cases(3, 30, hidden=6, largest_top_k=None))
    assert {case.pattern for case in cases} == set(PATTERNS)
    assert len({case.tokens for case in cases}) > 10


def test_capacities_by_hand(monkeypatch):
    # Rank 0 has three rows of expert 0 and one of expert 1, which are 8 when padded to a multiple of 4; rank 1 has two.
    ids = [torch.tensor([[0, 0], [0, 1]]), torch.tensor([[2, 3]])]
    case = Case(name="by hand", tokens=(2, 1), local_experts=2)
    monkeypatch.setattr(Case, "inputs", lambda self, rank: _given(ids[rank]))
    assert (most_rows(case, 1), most_rows(case, 4)) == (4, 8)
    assert capacities(case) == [(1, 2), (1, 3), (4, 4), (4, 0)]
    assert fixed(case, 7, 4).most_tokens == 2
    assert fixed(replace(case, tokens=(0, 0)), 7, 4).most_tokens == 1


def test_rows_that_are_no_padding_by_hand():
    # Three experts: two rows and two of padding, none, one row and one of padding; then two rows of no expert.
    counts_E, offsets_E = torch.tensor([2, 0, 1]), torch.tensor([4, 4, 6], dtype=torch.int32)
    plan = Plan(
        num_tokens=3,
        num_choices=1,
        num_local_experts=3,
        num_rows=8,
        counts_E=counts_E,
        offsets_E=offsets_E,
        overflow=torch.tensor(0),
    )
    sent = Dispatched(
        rows_RD=torch.ones(8, 1), probs_R=torch.ones(8), counts_E=counts_E, offsets_E=offsets_E, plan=plan
    )
    assert real_rows(sent).nonzero().flatten().tolist() == [0, 1, 4]


def test_inputs_are_copies():
    case = Case(name="copies", tokens=(3,))
    case.inputs(0).x_TD.zero_()
    case.inputs(0).ids_TK.fill_(-1)
    assert case.inputs(0).x_TD.abs().max() > 0.1
    assert case.inputs(0).ids_TK.min() >= 0
    other = replace(case, seed=1)
    assert not torch.equal(other.inputs(0).x_TD, case.inputs(0).x_TD)


def test_verdicts_fail_when_they_should():
    one, nan = torch.ones(2), torch.tensor([1.0, float("nan")])
    same(one, one.clone(), "equal")
    close(one, one + 1e-4, 1e-3, "close")
    refused("refused", refuse)
    refused("refused", refuse, words="n.$")
    for fails in (
        lambda: require(False, "no"),
        lambda: same(one, one.double(), "dtype"),
        lambda: same(one, torch.ones(2, 1), "shape"),
        lambda: same(one, one + 1e-6, "value"),
        lambda: same(nan, nan, "nan"),
        lambda: close(one, one + 1e-2, 1e-3, "too far"),
        lambda: close(nan, nan, 1e9, "nan"),
        lambda: close(one, torch.ones(2, 1), 1e9, "shape"),
        lambda: refused("accepted", lambda: None),
        lambda: refused("other words", refuse, words="yes"),
    ):
        with pytest.raises(AssertionError):
            fails()
    with pytest.raises(TypeError):
        refused("another error is not a refusal", int, None)


def refuse():
    raise MoeCommError("no")
