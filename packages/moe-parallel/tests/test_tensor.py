"""Ways of tokens between ranks that share features: values, adjoints, dtypes, layouts in memory, and refusals."""

import pytest
import torch

from moe_parallel import MoeParallelError, ParallelLayout, run_distributed, sum_everywhere
from moe_parallel.tensor import TRANSITIONS
from moe_parallel.testing import count_collectives, run_threads

WAYS = {**TRANSITIONS, "sum_everywhere": sum_everywhere}

# Of each way, what enters and what leaves: one value that all ranks hold alike, or one of each rank.
ALIKE, EACH = "alike", "each"
SPACES = {
    "sum_gradients": (ALIKE, EACH),
    "sum_outputs": (EACH, ALIKE),
    "gather_rows": (EACH, EACH),
    "sum_scatter_rows": (EACH, EACH),
    "split_rows": (ALIKE, EACH),
    "join_rows": (EACH, ALIKE),
    "sum_everywhere": (EACH, EACH),
}

# Forward of each way on the values of all ranks; backward is that of the other name.
BACKWARD = {
    "sum_gradients": "sum_outputs",
    "sum_outputs": "sum_gradients",
    "gather_rows": "sum_scatter_rows",
    "sum_scatter_rows": "gather_rows",
    "split_rows": "join_rows",
    "join_rows": "split_rows",
    "sum_everywhere": "sum_everywhere",
}

COMMUNICATES = {
    "sum_gradients": [],
    "sum_outputs": ["allreduce"],
    "gather_rows": ["allgather"],
    "sum_scatter_rows": ["alltoall"],
    "split_rows": [],
    "join_rows": ["allgather"],
    "sum_everywhere": ["allreduce"],
}


def expected(way, x_W):
    """Written out in one process: from what every rank has to what every rank gets."""
    ranks, total = len(x_W), sum(x_W)
    return {
        "sum_gradients": lambda: x_W,
        "sum_outputs": lambda: [total] * ranks,
        "gather_rows": lambda: [torch.cat(x_W)] * ranks,
        "sum_scatter_rows": lambda: list(total.chunk(ranks)),
        "split_rows": lambda: [x.chunk(ranks)[rank] for rank, x in enumerate(x_W)],
        "join_rows": lambda: [torch.cat(x_W)] * ranks,
        "sum_everywhere": lambda: [total] * ranks,
    }[way]()


def values(space, ranks, rows=12, dtype=torch.float64):
    x_W = [torch.randn(rows, 3, 2, dtype=dtype) for _ in range(ranks)]
    return [x_W[0].clone() for _ in x_W] if space == ALIKE else x_W


def move(way, x_W, grad_W=None):
    """Outputs by rank, gradients of the inputs by rank, and the collectives of forward and backward."""

    def on_rank(rank, groups):
        x = x_W[rank].detach().requires_grad_(grad_W is not None)
        with count_collectives() as there:
            y = WAYS[way](x, groups.group("world"))
        with count_collectives() as back:
            grad = None if grad_W is None else torch.autograd.grad(y, x, grad_W[rank])[0]
        return y.detach(), grad, there, back

    return list(zip(*run_threads(len(x_W), on_rank), strict=True))


def rows_out(way, ranks):
    return expected(way, values(EACH, ranks))[0].shape[0]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_values_and_gradients_are_those_of_one_process(way, ranks):
    x_W = values(SPACES[way][0], ranks)
    grad_W = values(SPACES[way][1], ranks, rows_out(way, ranks))
    y_W, dx_W, _, _ = move(way, x_W, grad_W)
    for y, wanted in zip(y_W, expected(way, x_W), strict=True):
        torch.testing.assert_close(y, wanted, rtol=1e-15, atol=1e-15)
    for dx, wanted in zip(dx_W, expected(BACKWARD[way], grad_W), strict=True):
        torch.testing.assert_close(dx, wanted, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("way", WAYS)
def test_backward_is_the_adjoint_of_forward(way, ranks):
    """<Ax, g> = <x, A'g>, where what all ranks hold alike counts once."""
    enters, leaves = SPACES[way]
    x_W, g_W = values(enters, ranks), values(leaves, ranks, rows_out(way, ranks))
    y_W, dx_W, _, _ = move(way, x_W, g_W)

    def product(space, a_W, b_W):
        products = [(a * b).sum() for a, b in zip(a_W, b_W, strict=True)]
        if space == ALIKE:
            assert all(torch.equal(one, products[0]) for one in products), "ranks disagree about what is alike"
        return products[0] if space == ALIKE else sum(products)

    torch.testing.assert_close(product(leaves, y_W, g_W), product(enters, x_W, dx_W), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_only_sums_and_joins_communicate_and_nothing_without_gradients(way):
    x_W, grad_W = values(SPACES[way][0], 2), values(SPACES[way][1], 2, rows_out(way, 2))
    _, _, there, back = move(way, x_W, grad_W)
    for names, wanted in ((there, COMMUNICATES[way]), (back, COMMUNICATES[BACKWARD[way]])):
        for of_rank in names:  # torch's names differ between releases in what is behind these
            assert len(of_rank) == len(wanted)
            assert all(name.replace("_", "").startswith(kind) for name, kind in zip(of_rank, wanted, strict=True))

    def without_grad(_, groups):
        return WAYS[way](x_W[0], groups.group("world")).requires_grad

    assert run_threads(2, without_grad) == [False, False]


@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_is_given_is_overwritten(way):
    x_W, grad_W = values(SPACES[way][0], 2), values(SPACES[way][1], 2, rows_out(way, 2))
    before = [x.clone() for x in (*x_W, *grad_W)]
    y_W, dx_W, _, _ = move(way, x_W, grad_W)
    for x, old in zip((*x_W, *grad_W), before, strict=True):
        assert torch.equal(x, old)
    if COMMUNICATES[way] or way == "split_rows":
        for y, x in zip(y_W, x_W, strict=True):
            assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
    if COMMUNICATES[BACKWARD[way]]:
        for dx, grad in zip(dx_W, grad_W, strict=True):
            assert dx.untyped_storage().data_ptr() != grad.untyped_storage().data_ptr()


def strided(x, rank):
    """The same values in another order of memory on every rank."""
    if rank == 0:
        return x
    if rank == 1:
        return x.transpose(0, 2).contiguous().transpose(0, 2)
    return torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0]


@pytest.mark.parametrize("way", WAYS)
def test_strides_that_differ_from_rank_to_rank_do_not_matter(way):
    x_W, grad_W = values(SPACES[way][0], 3), values(SPACES[way][1], 3, rows_out(way, 3))
    y_W, dx_W, _, _ = move(
        way, [strided(x, r) for r, x in enumerate(x_W)], [strided(g, r) for r, g in enumerate(grad_W)]
    )
    for y, wanted in zip(y_W, expected(way, x_W), strict=True):
        torch.testing.assert_close(y, wanted, rtol=1e-15, atol=1e-15)
    for dx, wanted in zip(dx_W, expected(BACKWARD[way], grad_W), strict=True):
        torch.testing.assert_close(dx, wanted, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("way", WAYS)
def test_bf16_stays_bf16_within_a_rounding_for_each_rank(way):
    ranks = 4
    x_W = values(SPACES[way][0], ranks, dtype=torch.bfloat16)
    grad_W = values(SPACES[way][1], ranks, rows_out(way, ranks), dtype=torch.bfloat16)
    y_W, dx_W, _, _ = move(way, x_W, grad_W)
    for name, results, given in ((way, y_W, x_W), (BACKWARD[way], dx_W, grad_W)):
        exact = expected(name, [x.double() for x in given])
        bound = expected(name, [x.double().abs() for x in given])
        for result, wanted, size in zip(results, exact, bound, strict=True):
            assert result.dtype == torch.bfloat16
            assert ((result.double() - wanted).abs() <= ranks * 2**-8 * size).all()


@pytest.mark.parametrize("way", WAYS)
def test_no_rows_at_all(way):
    x_W = values(EACH, 2, rows=0)
    y_W, dx_W, _, _ = move(way, x_W, x_W)
    assert all(x.shape == (0, 3, 2) for x in (*y_W, *dx_W))


@pytest.mark.parametrize("way", ["split_rows", "sum_scatter_rows"])
def test_rows_that_do_not_divide_name_both_numbers(way):
    rule = r"^7 tokens cannot be split evenly in group .* of ranks 0, 1, 2; pad them to a multiple of 3\n"
    with pytest.raises(MoeParallelError, match=rule):
        move(way, values(ALIKE, 3, rows=7))


@pytest.mark.parametrize("way", ["split_rows", "join_rows", "gather_rows"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
def test_masks_and_ids_move_as_features_do(way, dtype):
    x_W = [torch.randint(0, 2, (4,)).to(dtype)] * 2
    y_W, _, _, _ = move(way, x_W)
    for y, wanted in zip(y_W, expected(way, x_W), strict=True):
        assert y.dtype == dtype
        assert torch.equal(y, wanted)


@pytest.mark.parametrize("way", WAYS)
def test_one_rank_moves_nothing(way):
    x = torch.randn(3, 2)  # of any number of rows
    assert WAYS[way](x, None) is x


def test_a_second_derivative_is_refused():
    def on_rank(_, groups):
        x = torch.randn(2, requires_grad=True)
        (grad,) = torch.autograd.grad((sum_everywhere(x, groups.group("world")) ** 2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()

    run_threads(2, on_rank)


@pytest.mark.dist
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_same_on_processes(ranks):
    """gloo has rules of its own for strides, empty tensors and bool."""
    cases = {way: (values(SPACES[way][0], ranks), values(SPACES[way][1], ranks, rows_out(way, ranks))) for way in WAYS}

    def on_rank(mesh):
        rank, group = mesh.rank("tp"), mesh.group("tp")
        found = {}
        for way, (x_W, grad_W) in cases.items():
            x = strided(x_W[rank], rank).detach().requires_grad_()
            y = WAYS[way](x, group)
            found[way] = y.detach(), torch.autograd.grad(y, x, strided(grad_W[rank], rank))[0]
            assert WAYS[way](x[:0], group).shape == (0, 3, 2)
        mask = torch.arange(ranks) == 1
        assert torch.equal(WAYS["join_rows"](WAYS["split_rows"](mask, group), group), mask)
        return found

    found = run_distributed(ParallelLayout(world=ranks, tp=ranks), on_rank)
    for way, (x_W, grad_W) in cases.items():
        wanted = zip(expected(way, x_W), expected(BACKWARD[way], grad_W), strict=True)
        for rank, (y, dx) in enumerate(wanted):
            torch.testing.assert_close(found[rank][way], (y, dx), rtol=1e-15, atol=1e-15)
