"""Shape legend: T tokens, K choices, D model, E experts, R rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_kernels import MoeKernelsError
from moe_kernels.permute import permute, permute_probs, row_map, unpermute
from moe_kernels.testing import ragged_ids

E = 6


ids_cases = pytest.mark.parametrize(
    "ids_TK",
    [
        pytest.param(ragged_ids(40, 3, E, seed=1), id="plain"),
        pytest.param(ragged_ids(40, 3, E, seed=2, skew=3.0), id="skewed"),
        pytest.param(ragged_ids(40, 3, E, seed=3, dropped=0.3), id="dropped"),
        pytest.param(torch.tensor([[4, 4], [4, 0], [0, 0]]), id="duplicates"),
        pytest.param(torch.full((5, 2), -1), id="all dropped"),
        pytest.param(torch.zeros(0, 2, dtype=torch.int64), id="no tokens"),
        pytest.param(torch.tensor([[5]]), id="one"),
    ],
)
multiples = pytest.mark.parametrize("row_multiple", [1, 8, 16, 128])


def choices_by_expert(ids_TK: Tensor) -> list[list[int]]:
    """Flat choices of each expert, in order, written without tensors."""
    flat = ids_TK.flatten().tolist()
    return [[choice for choice, expert in enumerate(flat) if expert == e] for e in range(E)]


@ids_cases
@multiples
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
def test_r041_unpermute_of_permute_counts_the_choices(ids_TK: Tensor, row_multiple: int) -> None:
    layout = row_map(ids_TK, E, row_multiple=row_multiple)
    x_TD = torch.randint(-8, 9, (ids_TK.shape[0], 5)).float()
    assert torch.equal(unpermute(permute(x_TD, layout), layout), x_TD * (ids_TK >= 0).sum(-1, keepdim=True))


@ids_cases
@multiples
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_and_probabilities_are_those_of_their_choice(
    ids_TK: Tensor, row_multiple: int, dtype: torch.dtype
) -> None:
    layout = row_map(ids_TK, E, row_multiple=row_multiple)
    tokens, choices = ids_TK.shape
    x_TD, probs_TK = torch.randn(tokens, 4).to(dtype), torch.rand(tokens, choices)
    rows_RD, probs_R = permute(x_TD, layout), permute_probs(probs_TK, layout)
    assert rows_RD.dtype == dtype
    for row, choice in enumerate(layout.choice_R.tolist()):
        expected = x_TD[choice // choices] if choice >= 0 else torch.zeros(4, dtype=dtype)
        assert torch.equal(rows_RD[row], expected)
        assert probs_R[row] == (probs_TK.flatten()[choice] if choice >= 0 else 0)


@ids_cases
@pytest.mark.parametrize("row_multiple", [1, 4])
@pytest.mark.parametrize("function", [permute, permute_probs, unpermute])
def test_gradcheck(ids_TK: Tensor, row_multiple: int, function: Callable[..., Tensor]) -> None:
    ids_TK = ids_TK[:6]
    layout = row_map(ids_TK, E, row_multiple=row_multiple)
    shape = {permute: (ids_TK.shape[0], 2), permute_probs: ids_TK.shape, unpermute: (layout.num_rows, 2)}[function]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: function(x, layout), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_unpermute_adds_in_the_internal_dtype_in_the_order_of_k_and_rounds_once(dtype: torch.dtype) -> None:
    ids_TK = ragged_ids(200, 5, E, seed=4, dropped=0.1)
    layout = row_map(ids_TK, E)
    rows_RD = torch.randn(layout.num_rows, 7).to(dtype)
    sum_TD = torch.zeros(200, 7)
    for k in range(5):
        row_T = layout.row_TK[:, k]
        sum_TD += torch.where(row_T[:, None] >= 0, rows_RD[row_T.clamp(min=0)].to(torch.float32), 0)
    y_TD = unpermute(rows_RD, layout)
    assert y_TD.dtype == dtype
    # One rounding is at most half a unit in the last place; a sum in the dtype itself makes up to five of them.
    half_ulp_TD = sum_TD.abs() * torch.finfo(dtype).eps / 2 if dtype != torch.float32 else torch.zeros(())
    assert ((y_TD.to(torch.float32) - sum_TD).abs() <= half_ulp_TD).all()


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


def test_r127_combine_is_bitwise_the_same_in_every_run_and_order_of_experts() -> None:
    ids_TK = ragged_ids(500, 4, E, seed=6)
    x_TD, scale_E = torch.randn(500, 64), torch.randn(E)

    def combined(ids_TK: Tensor, scale_E: Tensor) -> Tensor:
        layout = row_map(ids_TK, E)
        expert_R = torch.repeat_interleave(torch.arange(E), layout.counts_E)
        return unpermute(permute(x_TD, layout) * scale_E[expert_R, None], layout)

    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        first = combined(ids_TK, scale_E)
        assert all(torch.equal(combined(ids_TK, scale_E), first) for _ in range(20))
    finally:
        torch.set_num_threads(threads)
    label_E = torch.randperm(E)  # experts run in another order
    relabelled_E = torch.empty_like(scale_E)
    relabelled_E[label_E] = scale_E
    assert torch.equal(combined(label_E[ids_TK], relabelled_E), first)


def test_r130_two_steps_in_poisoned_memory_agree() -> None:
    ids_TK = ragged_ids(20, 2, E, seed=7, dropped=0.3)
    x_TD = torch.randn(20, 3)
    steps = []
    for _ in range(2):
        layout = row_map(ids_TK, E, row_multiple=8)
        steps.append(unpermute(permute(x_TD, layout), layout))
    assert torch.equal(*steps)
    assert steps[0].isfinite().all()


@pytest.mark.parametrize("bad", [-2, E])
def test_ids_out_of_range_are_refused(bad: int) -> None:
    with pytest.raises(MoeKernelsError, match=rf"\[0, {E}\), got .* {bad}"):
        row_map(torch.tensor([[0, 1], [2, bad]]), E)


def test_wrong_sizes_are_refused() -> None:
    layout = row_map(torch.tensor([[0, 1], [2, 3]]), E)
    with pytest.raises(MoeKernelsError, match="2 tokens, the tensor has 3"):
        permute(torch.zeros(3, 1), layout)
    with pytest.raises(MoeKernelsError, match="2 tokens, the tensor has 3"):
        permute_probs(torch.zeros(3, 2), layout)
    with pytest.raises(MoeKernelsError, match="4 rows, the tensor has 3"):
        unpermute(torch.zeros(3, 1), layout)
    with pytest.raises(MoeKernelsError, match="multiple of 0"):
        row_map(torch.tensor([[0]]), E, row_multiple=0)
