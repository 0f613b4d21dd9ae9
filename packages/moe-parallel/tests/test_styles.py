"""Edges of modules, and modules in the place of others."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from moe_parallel import AxisGroups, Boundary, MoeParallelError, SharedPieces, SplitVocabulary
from moe_parallel.plan import part_of
from moe_parallel.styles import LinearPiece
from moe_parallel.tensor import TRANSITIONS
from moe_parallel.testing import count_collectives


class Calls(nn.Module):
    """Returns what it is called with, and remembers it."""

    def forward(self, *values, **keywords):
        self.seen = values
        self.keywords = keywords
        return values if len(values) != 1 else values[0]


class Pair(NamedTuple):
    tokens: Tensor
    count: int


class NamedPair(nn.Module):
    def forward(self, x):
        return Pair(x, 7)


def test_values_are_moved_by_their_place(on_tp):
    a, b, c = torch.randn(4, 3), torch.arange(4), "anything"

    def on_rank(groups):
        module = Calls()
        assert Boundary(inputs=("split_rows", None), outputs=("join_rows", "split_rows"))(module, groups) is module
        out = module(a, b, c, keyword=b)
        assert torch.equal(module.seen[0], a.chunk(2)[groups.rank("tp")])
        assert module.seen[1] is b
        assert module.seen[2] is out[2] is c
        assert module.keywords["keyword"] is b
        assert torch.equal(out[0], a)
        assert torch.equal(out[1], b.chunk(2)[groups.rank("tp")])
        assert type(out) is tuple

    on_tp(2, on_rank)


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_every_way_is_the_function_of_its_name(on_tp, transition):
    x_W = [torch.randn(4, 3) for _ in range(2)]

    def on_rank(groups):
        x, group = x_W[groups.rank("tp")], groups.group("tp")
        module = Boundary(inputs=(transition,))(Calls(), groups)
        assert torch.equal(module(x), TRANSITIONS[transition](x, group))
        module = Boundary(outputs=(transition,))(Calls(), groups)
        assert torch.equal(module(x), TRANSITIONS[transition](x, group))
        assert module.seen[0] is x

    on_tp(2, on_rank)


def test_rules_on_one_module_add_up_in_their_order(on_tp):
    def on_rank(groups):
        module = Calls()
        for way in ("gather_rows", "split_rows"):
            Boundary(inputs=(way,))(module, groups)
        x = torch.full((2, 1), float(groups.rank("tp")))
        assert torch.equal(module(x), x)

    on_tp(2, on_rank)


def test_a_named_tuple_stays_one(on_tp):
    def on_rank(groups):
        out = Boundary(outputs=("sum_outputs",))(NamedPair(), groups)(torch.ones(2))
        assert isinstance(out, Pair)
        assert torch.equal(out.tokens, torch.full((2,), 2.0))
        assert out.count == 7

    on_tp(2, on_rank)


@pytest.mark.parametrize(
    ("inputs", "call", "rule"),
    [
        (
            ("gather_rows",),
            lambda m: m(x=torch.ones(2)),
            r"moves 1 positional arguments of Calls, but there are 0; it ca",
        ),
        (
            (None, "gather_rows"),
            lambda m: m(1, x=torch.ones(2)),
            r"moves 2 positional arguments of Calls, but there are 1",
        ),
        (
            ("gather_rows",),
            lambda m: m(None),
            r"Calls by gather_rows, but number 0 is no tensor: it is of type NoneType",
        ),
        ((None, "split_rows"), lambda m: m(1, [1]), r"by split_rows, but number 1 is no tensor: it is of type list"),
    ],
)
def test_r050_what_cannot_be_moved_is_an_error_and_not_skipped(on_tp, inputs, call, rule):
    with pytest.raises(MoeParallelError, match=rule):
        on_tp(2, lambda groups: call(Boundary(inputs=inputs)(Calls(), groups)))


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        ((torch.ones(2),), r"moves 2 values from Calls, but there are 1"),
        (([torch.ones(2)], torch.ones(2)), r"values from Calls by sum_outputs, but number 0 is no tensor.* type list"),
    ],
)
def test_r050_outputs_that_cannot_be_moved(on_tp, value, rule):
    boundary = Boundary(outputs=("sum_outputs", "sum_outputs"))
    with pytest.raises(MoeParallelError, match=rule):
        on_tp(2, lambda groups: boundary(Calls(), groups)(*value))


@pytest.mark.parametrize(
    "wrong", [{"inputs": ("gather_row",)}, {"outputs": (None, "all_reduce")}, {"inputs": "gather_rows"}]
)
def test_r050_a_way_that_does_not_exist(wrong):
    with pytest.raises(
        MoeParallelError, match=r"^a boundary can do sum_gradients, .*, but not '(gather_row|all_reduce|g)'$"
    ):
        Boundary(**wrong)


def test_one_rank_needs_no_edges():
    module = nn.Linear(2, 2)
    Boundary(inputs=("split_rows",), outputs=("join_rows",))(module, AxisGroups())
    x = torch.randn(3, 2)  # no multiple of anything
    with count_collectives() as issued:
        assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
    assert issued == []
    embedding = nn.Embedding(3, 2)
    assert SplitVocabulary()(embedding, AxisGroups()) is embedding


def test_another_axis(on_tp):
    def on_rank(groups):
        other = AxisGroups({"etp": groups.group("tp")})
        module = Boundary(inputs=("gather_rows",), axis="etp")(Calls(), other)
        assert module(torch.ones(1, 1)).shape == (2, 1)
        part = SplitVocabulary(axis="etp")(nn.Embedding(5, 2), other)
        assert (part.first, part.rows) == ((0, 3), (3, 2))[groups.rank("tp")]
        piece = SharedPieces(pieces=2, axis="etp")(nn.Linear(2, 4), other)
        assert piece(torch.ones(1, 2)).shape == (1, 2)

    on_tp(2, on_rank)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", [4, 7, 257])
def test_the_parts_of_a_vocabulary(on_tp, size, ranks):
    def on_rank(groups):
        module = SplitVocabulary()(nn.Embedding(size, 2), groups)
        return module.first, module.first + module.rows

    if (-(-size // ranks)) * (ranks - 1) >= size:  # 4 over 3 ranks: 2, 2, 0
        with pytest.raises(
            MoeParallelError, match=f"a vocabulary of {size} leaves some of {ranks} ranks without an entry"
        ):
            on_tp(ranks, on_rank)
    else:
        assert on_tp(ranks, on_rank) == [part_of(size, ranks, rank) for rank in range(ranks)]


@pytest.mark.parametrize(
    "options", [{"padding_idx": 0}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]
)
def test_an_embedding_with_options_is_refused_on_any_number_of_ranks(options):
    with pytest.raises(MoeParallelError, match="without padding_idx, max_norm, scale_grad_by_freq and sparse"):
        SplitVocabulary()(nn.Embedding(4, 2, **options), AxisGroups())


def test_styles_name_the_module_that_they_are_for():
    with pytest.raises(MoeParallelError, match=r"split in an nn\.Embedding, not in Linear"):
        SplitVocabulary()(nn.Linear(2, 2), AxisGroups())
    with pytest.raises(MoeParallelError, match=r"shared out in an nn\.Linear, not in Embedding"):
        SharedPieces(pieces=1)(nn.Embedding(2, 2), AxisGroups())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("ranks", "pieces"), [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (3, 1)])
def test_shared_pieces_are_the_whole_in_values_and_gradients(on_tp, ranks, pieces, bias):
    """Consecutive ranks have the same piece, and gradients of all ranks add up to that of the whole."""
    linear = nn.Linear(5, 8, bias=bias).double()
    x, grad_W = torch.randn(3, 5, dtype=torch.float64), torch.randn(ranks, 3, 8 // pieces, dtype=torch.float64)
    whole = linear(x)
    copies = [nn.Linear(5, 8, bias=bias).double() for _ in range(ranks)]
    for copy in copies:
        copy.load_state_dict(linear.state_dict())

    def on_rank(groups):
        rank = groups.rank("tp")
        piece = SharedPieces(pieces=pieces)(copies[rank], groups)
        assert piece.weight is copies[rank].weight
        y = piece(x)
        y.backward(grad_W[rank])
        return y.detach(), piece.weight.grad, None if piece.bias is None else piece.bias.grad

    results = on_tp(ranks, on_rank)
    dwhole = torch.zeros_like(whole)
    for rank, (y, _, _) in enumerate(results):
        number = rank * pieces // ranks
        columns = slice(number * 8 // pieces, (number + 1) * 8 // pieces)
        torch.testing.assert_close(y, whole[:, columns], rtol=1e-14, atol=1e-14)
        dwhole[:, columns] += grad_W[rank]
    whole.backward(dwhole)
    torch.testing.assert_close(sum(dweight for _, dweight, _ in results), linear.weight.grad, rtol=1e-13, atol=1e-13)
    if bias:
        torch.testing.assert_close(sum(dbias for *_, dbias in results), linear.bias.grad, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("pieces", "features", "ranks"), [(3, 6, 4), (4, 6, 4), (0, 6, 2), (-1, 6, 2), (4, 8, 2)])
def test_pieces_that_cannot_be_shared_evenly(on_tp, pieces, features, ranks):
    rule = rf"{features} output features in {pieces} equal pieces cannot be shared evenly by {ranks} ranks"
    with pytest.raises(MoeParallelError, match=rule):
        on_tp(ranks, lambda groups: SharedPieces(pieces=pieces)(nn.Linear(2, features), groups))


def test_a_piece_of_a_weight_that_is_cut_as_well_is_refused():
    piece = LinearPiece(nn.Parameter(torch.randn(4, 2)), None, 2, 4)
    piece.weight = nn.Parameter(torch.randn(2, 2))
    with pytest.raises(MoeParallelError, match=r"of 4 output features is made of the whole weight, .* must not split"):
        piece(torch.ones(1, 2))
