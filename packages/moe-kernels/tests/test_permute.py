"""Shape legend: T tokens, K choices, D model, E experts, R rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_kernels import MoeKernelsError
from moe_kernels.permute import most_rows, permute, permute_probs, permute_with_probs, row_map, unpermute
from moe_kernels.testing import ragged_ids, rounding_error

E = 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


ids_cases = pytest.mark.parametrize(
    "ids_TK",
    [
        pytest.param(ragged_ids(40, 3, E, seed=1).to(DEVICE), id="plain"),
        pytest.param(ragged_ids(40, 3, E, seed=2, skew=3.0).to(DEVICE), id="skewed"),
        pytest.param(ragged_ids(40, 3, E, seed=3, dropped=0.3).to(DEVICE), id="dropped"),
        pytest.param(torch.tensor([[4, 4], [4, 0], [0, 0]], device=DEVICE), id="duplicates"),
        pytest.param(torch.full((5, 2), -1, device=DEVICE), id="all dropped"),
        pytest.param(torch.zeros(0, 2, dtype=torch.int64, device=DEVICE), id="no tokens"),
        pytest.param(torch.tensor([[5]], device=DEVICE), id="one"),
    ],
)
multiples = pytest.mark.parametrize("row_multiple", [1, 8, 16, 128])


def choices_by_expert(ids_TK: Tensor) -> list[list[int]]:
    """Flat choices of each expert, in order, written without tensors."""
    flat = ids_TK.flatten().tolist()
    return [[choice for choice, expert in enumerate(flat) if expert == e] for e in range(E)]


@ids_cases
@multiples
@pytest.mark.usefixtures("implementation")
def test_r041_map_and_offsets_are_consistent(ids_TK: Tensor, row_multiple: int) -> None:
    layout = row_map(ids_TK, E, row_multiple=row_multiple)
    rows = layout.choice_R.tolist()
    start = 0
    for expert, choices in enumerate(choices_by_expert(ids_TK)):
        end = int(layout.offsets_E[expert])
        assert rows[start : start + len(choices)] == choices  # (expert, token, k), stable
        assert rows[start + len(choices) : end] == [-1] * (end - start - len(choices))
        assert (end - start) % row_multiple == 0
        assert end - start - len(choices) < row_multiple  # an empty expert stays empty
        assert layout.counts_E[expert] == len(choices)
        start = end
    assert start == layout.num_rows == len(rows)
    for choice, row in enumerate(layout.row_TK.flatten().tolist()):
        assert (row == -1) == (ids_TK.flatten()[choice] == -1)
        assert row == -1 or rows[row] == choice
    assert (layout.counts_E.dtype, layout.offsets_E.dtype) == (torch.int64, torch.int32)


@ids_cases
@multiples
@pytest.mark.usefixtures("implementation")
def test_r041_unpermute_of_permute_counts_the_choices(ids_TK: Tensor, row_multiple: int) -> None:
    layout = row_map(ids_TK, E, row_multiple=row_multiple)
    x_TD = torch.randint(-8, 9, (ids_TK.shape[0], 5), device=DEVICE).float()
    assert torch.equal(unpermute(permute(x_TD, layout), layout), x_TD * (ids_TK >= 0).sum(-1, keepdim=True))


@ids_cases
@pytest.mark.parametrize("row_multiple", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("implementation")
def test_rows_and_probabilities_are_those_of_their_choice(
    ids_TK: Tensor, row_multiple: int, dtype: torch.dtype
) -> None:
    layout = row_map(ids_TK, E, row_multiple=row_multiple)
    tokens, choices = ids_TK.shape
    x_TD, probs_TK = torch.randn(tokens, 4, device=DEVICE).to(dtype), torch.rand(tokens, choices, device=DEVICE)
    rows_RD, probs_R = permute(x_TD, layout), permute_probs(probs_TK, layout)
    assert rows_RD.dtype == dtype
    for row, choice in enumerate(layout.choice_R.tolist()):
        expected = x_TD[choice // choices] if choice >= 0 else torch.zeros(4, dtype=dtype, device=DEVICE)
        assert torch.equal(rows_RD[row], expected)
        assert probs_R[row] == (probs_TK.flatten()[choice] if choice >= 0 else 0)
    for together, alone in zip(permute_with_probs(x_TD, probs_TK, layout), (rows_RD, probs_R), strict=True):
        assert torch.equal(together, alone)


@ids_cases
@pytest.mark.parametrize("row_multiple", [1, 8])
@pytest.mark.parametrize("room", ["most", "less"])
def test_a_map_of_given_size_holds_the_same_rows_and_counts_what_it_cannot(
    ids_TK: Tensor, row_multiple: int, room: str
) -> None:
    exact = row_map(ids_TK, E, row_multiple=row_multiple)
    size = most_rows(*ids_TK.shape, E, row_multiple=row_multiple) if room == "most" else exact.num_rows * 2 // 3
    layout = row_map(ids_TK, E, row_multiple=row_multiple, capacity_rows=size)
    assert layout.num_rows == size
    assert layout.overflow is not None
    held = min(size, exact.num_rows)
    assert torch.equal(layout.choice_R[:held], exact.choice_R[:held])
    assert (layout.choice_R[held:] == -1).all()
    assert torch.equal(layout.row_TK, exact.row_TK.masked_fill(exact.row_TK >= held, -1))
    assert torch.equal(layout.offsets_E, exact.offsets_E.clamp(max=held))
    assert int(layout.counts_E.sum()) == int((layout.choice_R >= 0).sum())
    assert int(layout.overflow) == int(exact.counts_E.sum() - layout.counts_E.sum())


def test_the_most_rows_are_those_of_the_worst_ids() -> None:
    for choices, experts, multiple in ((12, 3, 4), (2, 5, 8), (0, 3, 4), (7, 1, 1)):
        # All but one of the experts have a single choice, so that each is padded most.
        ids_TK = torch.arange(choices).clamp(max=experts - 1)[:, None]
        found = row_map(ids_TK, experts, row_multiple=multiple).num_rows
        assert found <= most_rows(choices, 1, experts, row_multiple=multiple)
        if multiple > 1 and choices:
            assert found > most_rows(choices, 1, experts, row_multiple=multiple) - multiple
    assert most_rows(4096, 8, 256) == 32768


@ids_cases
def test_every_expert_has_as_many_rows_as_it_is_given(ids_TK: Tensor) -> None:
    layout = row_map(ids_TK, E, rows_per_expert=4)
    rows = layout.choice_R.tolist()
    lost = 0
    for expert, choices in enumerate(choices_by_expert(ids_TK)):
        kept = choices[:4]
        assert rows[expert * 4 : expert * 4 + 4] == kept + [-1] * (4 - len(kept))
        assert layout.counts_E[expert] == len(kept)
        lost += len(choices) - len(kept)
    assert layout.offsets_E.tolist() == [4, 8, 12, 16, 20, 24]
    assert layout.overflow == lost


def test_where_the_host_is_not_synchronised_ids_out_of_range_are_counted() -> None:
    layout = row_map(torch.tensor([[0, E], [-2, 1], [-1, 0]]), E, capacity_rows=8)
    assert layout.overflow == 2
    assert layout.row_TK.tolist() == [[0, -1], [-1, 2], [-1, 1]]


@ids_cases
@pytest.mark.parametrize("sizes", [{"row_multiple": 1}, {"row_multiple": 4}, {"capacity_rows": 9}])
@pytest.mark.parametrize("function", [permute, permute_probs, unpermute])
def test_gradcheck(ids_TK: Tensor, sizes: dict[str, int], function: Callable[..., Tensor]) -> None:
    ids_TK = ids_TK[:6].cpu()
    layout = row_map(ids_TK, E, **sizes)
    shape = {permute: (ids_TK.shape[0], 2), permute_probs: ids_TK.shape, unpermute: (layout.num_rows, 2)}[function]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: function(x, layout), x)


@pytest.mark.parametrize("sizes", [{"row_multiple": 1}, {"row_multiple": 4}, {"capacity_rows": 9}])
def test_gradcheck_of_tokens_and_probabilities_together(sizes: dict[str, int]) -> None:
    layout = row_map(ragged_ids(6, 2, E, seed=1, dropped=0.2), E, **sizes)
    leaves = [torch.randn(6, features, dtype=torch.float64, requires_grad=True) for features in (3, 2)]
    assert torch.autograd.gradcheck(lambda x, p: permute_with_probs(x, p, layout), leaves)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [{}, {"capacity_rows": 900}])
def test_unpermute_adds_in_the_internal_dtype_in_the_order_of_k_and_rounds_once(
    dtype: torch.dtype, sizes: dict[str, int], implementation: str
) -> None:
    ids_TK = ragged_ids(200, 5, E, seed=4, dropped=0.1).to(DEVICE)
    layout = row_map(ids_TK, E, **sizes)
    rows_RD = torch.randn(layout.num_rows, 7, device=DEVICE).to(dtype)
    sum_TD = torch.zeros(200, 7, device=DEVICE)
    for k in range(5):
        row_T = layout.row_TK[:, k]
        sum_TD += torch.where(row_T[:, None] >= 0, rows_RD[row_T.clamp(min=0)].to(torch.float32), 0)
    y_TD = unpermute(rows_RD, layout)
    assert y_TD.dtype == dtype
    # One rounding is at most half a unit in the last place; a sum in the dtype itself makes up to five of them.
    rounded_once = 0.0 if dtype == torch.float32 else rounding_error(dtype, implementation)
    assert ((y_TD.to(torch.float32) - sum_TD).abs() <= sum_TD.abs() * rounded_once).all()


class OperatorNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dropped", [0.0, 0.2])
@pytest.mark.parametrize("row_multiple", [1, 8])
def test_r127_nothing_accumulates_through_repeated_indices(dropped: float, row_multiple: int) -> None:
    ids_TK = ragged_ids(30, 3, E, seed=5, dropped=dropped)
    x_TD = torch.randn(30, 4, requires_grad=True)
    probs_TK = torch.rand(30, 3, requires_grad=True)
    with OperatorNames() as seen:
        layout = row_map(ids_TK, E, row_multiple=row_multiple)
        rows_RD = permute(x_TD, layout) * permute_probs(probs_TK, layout)[:, None]
        unpermute(rows_RD, layout).square().sum().backward()
    assert "index_select" in seen.names
    accumulating = {"index_add", "index_add_", "scatter_add", "scatter_add_", "index_put", "index_put_", "put_"}
    accumulating |= {"_index_put_impl_", "scatter_reduce", "scatter_reduce_", "embedding_dense_backward", "bincount"}
    assert not seen.names & accumulating


@pytest.mark.usefixtures("implementation")
def test_r127_combine_is_bitwise_the_same_in_every_run_and_order_of_experts() -> None:
    ids_TK = ragged_ids(100, 4, E, seed=6).to(DEVICE)
    x_TD, scale_E = torch.randn(100, 64, device=DEVICE), torch.randn(E, device=DEVICE)

    def combined(ids_TK: Tensor, scale_E: Tensor) -> Tensor:
        layout = row_map(ids_TK, E)
        expert_R = torch.repeat_interleave(torch.arange(E, device=DEVICE), layout.counts_E)
        return unpermute(permute(x_TD, layout) * scale_E[expert_R, None], layout)

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first = combined(ids_TK, scale_E)
        assert all(torch.equal(combined(ids_TK, scale_E), first) for _ in range(5))
    finally:
        torch.set_num_threads(threads)
    label_E = torch.randperm(E, device=DEVICE)  # experts run in another order
    relabelled_E = torch.empty_like(scale_E)
    relabelled_E[label_E] = scale_E
    assert torch.equal(combined(label_E[ids_TK], relabelled_E), first)


@pytest.mark.usefixtures("implementation")
def test_r130_two_steps_in_poisoned_memory_agree() -> None:
    ids_TK = ragged_ids(20, 2, E, seed=7, dropped=0.3).to(DEVICE)
    x_TD = torch.randn(20, 3, device=DEVICE)
    steps = []
    for _ in range(2):
        layout = row_map(ids_TK, E, row_multiple=8)
        steps.append(unpermute(permute(x_TD, layout), layout))
    assert torch.equal(*steps)
    assert steps[0].isfinite().all()


@pytest.mark.parametrize("bad", [-2, E])
@pytest.mark.usefixtures("implementation")
def test_ids_out_of_range_are_refused(bad: int) -> None:
    with pytest.raises(MoeKernelsError, match=rf"\[0, {E}\), got .* {bad}"):
        row_map(torch.tensor([[0, 1], [2, bad]], device=DEVICE), E)


def test_wrong_sizes_are_refused() -> None:
    layout = row_map(torch.tensor([[0, 1], [2, 3]]), E)
    with pytest.raises(MoeKernelsError, match="2 tokens, the tensor has 3"):
        permute(torch.zeros(3, 1), layout)
    with pytest.raises(MoeKernelsError, match="2 tokens, the tensor has 3"):
        permute_probs(torch.zeros(3, 2), layout)
    with pytest.raises(MoeKernelsError, match="4 rows, the tensor has 3"):
        unpermute(torch.zeros(3, 1), layout)
    with pytest.raises(MoeKernelsError, match="2 tokens, the tensor has 1"):
        permute_with_probs(torch.zeros(2, 1), torch.zeros(1, 2), layout)
    for sizes, says in (
        ({"row_multiple": 0}, "multiple of 0"),
        ({"num_rows": 1, "row_multiple": 2}, "num_rows is for rows without padding"),
        ({"rows_per_expert": 1, "row_multiple": 2}, "rows_per_expert is for rows without padding"),
        ({"num_rows": 1, "capacity_rows": 1}, "num_rows and capacity_rows each"),
        ({"capacity_rows": -1}, "capacity_rows = -1"),
    ):
        with pytest.raises(MoeKernelsError, match=says):
            row_map(torch.tensor([[0]]), E, **sizes)
