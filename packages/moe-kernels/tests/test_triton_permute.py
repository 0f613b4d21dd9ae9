"""What is particular to the kernels of the row map and the permutation; `test_permute.py` runs them as well.

Shape legend: T tokens, K choices, D model, E experts, R rows.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_kernels import implementation as choice
from moe_kernels.permute import RowMap, permute_with_probs, row_map, unpermute
from moe_kernels.testing import ragged_ids

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernels = pytest.importorskip("moe_kernels.triton_kernels.permute")
map_kernels = pytest.importorskip("moe_kernels.triton_kernels.row_map")

E = 6
# More than one small block each.
IDS = {
    "plain": ragged_ids(12, 3, E, seed=1),
    "skewed": ragged_ids(11, 3, E, seed=2, skew=3.0),
    "dropped": ragged_ids(12, 3, E, seed=3, dropped=0.3),
    "duplicates": torch.tensor([[4, 4], [4, 0], [0, 0]]),
    "all dropped": torch.full((5, 2), -1),
    "no tokens": torch.zeros(0, 2, dtype=torch.int64),
    "outside": torch.tensor([[0, 6], [-2, 1], [2**32, 2], [-1, 5]]),
}
SIZES: dict[str, dict[str, int]] = {
    "exact": {},
    "padded": {"row_multiple": 8},
    "bound": {"capacity_rows": 80, "row_multiple": 8},
    "short": {"capacity_rows": 21, "row_multiple": 8},
    "none": {"capacity_rows": 0},
    "per expert": {"rows_per_expert": 5},
}
# Where the host is synchronised, ids that name no expert are refused (`test_permute.py`).
CASES = [(ids, sizes) for ids in IDS for sizes in SIZES if ids != "outside" or sizes not in ("exact", "padded")]
ROUND_TRIPS = [(ids, sizes) for ids, sizes in CASES if sizes in ("padded", "bound", "per expert")]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of everything for few tokens."""
    for name, size in {"_BLOCK_C": 16, "_BLOCK_J": 8, "_BLOCK_E": 4, "_BLOCK_R": 8, "_COUNTS": 16}.items():
        monkeypatch.setattr(map_kernels, name, size)
    for name, size in {"_WIDEST": 8, "_TILE": 64, "_BLOCK_P": 16}.items():
        monkeypatch.setattr(kernels, name, size)


def both(function: Callable[[], Any]) -> Iterator[Any]:
    for name in ("plain", "triton"):
        with choice.implementation(name):
            yield function()


def tensors(layout: RowMap) -> dict[str, Any]:
    names = ("num_rows", "is_padded", "counts_E", "offsets_E", "row_TK", "choice_R", "overflow")
    return {name: getattr(layout, name) for name in names}


@pytest.mark.parametrize(("ids", "sizes"), CASES)
@pytest.mark.usefixtures("small_blocks")
def test_the_map_is_the_plain_one_bit_for_bit(ids: str, sizes: str) -> None:
    ids_TK = IDS[ids].to(DEVICE)
    plain, fused = both(lambda: tensors(row_map(ids_TK, E, **SIZES[sizes])))
    for name, value in plain.items():
        if isinstance(value, Tensor):
            assert torch.equal(fused[name], value), name
            assert fused[name].dtype == value.dtype
        else:
            assert fused[name] == value, name


@pytest.mark.parametrize("experts", [1, 2, 7, 40])
@pytest.mark.usefixtures("small_blocks")
def test_the_map_is_the_plain_one_for_any_number_of_experts(experts: int) -> None:
    ids_TK = torch.randint(-1, experts, (23, 2), device=DEVICE)
    plain, fused = both(lambda: tensors(row_map(ids_TK, experts, row_multiple=3)))
    for name in ("counts_E", "offsets_E", "row_TK", "choice_R"):
        assert torch.equal(fused[name], plain[name]), name


def round_trip(ids_TK: Tensor, x_TD: Tensor, probs_TK: Tensor, **sizes: int) -> tuple[Tensor, ...]:
    """Rows, their probabilities, sums per token, and gradients."""
    layout = row_map(ids_TK, E, **sizes)
    x_TD, probs_TK = (leaf.detach().requires_grad_() for leaf in (x_TD, probs_TK))
    rows_RD, probs_R = permute_with_probs(x_TD, probs_TK, layout)
    y_TD = unpermute(rows_RD * probs_R[:, None].to(rows_RD.dtype), layout)
    grads = torch.autograd.grad(y_TD, (x_TD, probs_TK), torch.arange(y_TD.numel(), device=DEVICE).view_as(y_TD) % 5 - 2)
    return rows_RD, probs_R, y_TD, *grads


@pytest.mark.parametrize(("ids", "sizes"), ROUND_TRIPS)
def test_rows_and_sums_in_fp16_are_the_plain_ones(ids: str, sizes: str) -> None:
    ids_TK = IDS[ids].to(DEVICE)
    # Both round once; eighths, and sums of some, are exact.
    x_TD, probs_TK = eighths(ids_TK.shape[0], 11).half(), eighths(*ids_TK.shape).abs()
    plain, fused = both(lambda: round_trip(ids_TK, x_TD, probs_TK, **SIZES[sizes]))
    for one, other in zip(fused, plain, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize(("ids", "sizes"), ROUND_TRIPS)
@pytest.mark.usefixtures("small_blocks")
def test_rows_and_sums_in_fp32_are_the_plain_ones_bit_for_bit(ids: str, sizes: str) -> None:
    ids_TK = IDS[ids].to(DEVICE)
    x_TD, probs_TK = torch.randn(ids_TK.shape[0], 11, device=DEVICE), torch.rand(ids_TK.shape, device=DEVICE)
    plain, fused = both(lambda: round_trip(ids_TK, x_TD, probs_TK, **SIZES[sizes]))
    for one, other in zip(fused, plain, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def eighths(*shape: int) -> Tensor:
    return torch.randint(-8, 9, shape, device=DEVICE) / 8


def test_bf16_is_copied_exactly_and_summed_in_fp32() -> None:
    ids_TK = IDS["plain"].to(DEVICE)
    x_TD = torch.randn(12, 12, device=DEVICE).bfloat16()
    with choice.implementation("triton"):
        layout = row_map(ids_TK, E)
        rows_RD, _ = permute_with_probs(x_TD, torch.rand(12, 3, device=DEVICE), layout)
        assert torch.equal(rows_RD, x_TD[layout.choice_R // 3])
        y_TD = unpermute(rows_RD, layout)
    # Three times a bf16 number in fp32, rounded once; the interpreter truncates, a device rounds to nearest.
    exact_TD = 3 * x_TD.double()
    unit = torch.finfo(torch.bfloat16).eps * (1 if DEVICE == "cpu" else 0.5)
    assert ((y_TD.double() - exact_TD).abs() <= unit * exact_TD.abs()).all()
    assert (y_TD.double() - exact_TD).norm() > 0


@pytest.mark.parametrize("features", [1, 7, 32, 1030])
def test_any_number_of_features_and_strides(features: int) -> None:
    ids_TK = ragged_ids(5, 2, E, seed=4, dropped=0.2).to(DEVICE)
    base = torch.randn(2 * features, 5, device=DEVICE)
    probs = torch.rand(2, 5, device=DEVICE)
    wide = torch.randn(5, features + 3, device=DEVICE)
    for x_TD in (base[::2].t(), wide[:, 3:]):
        plain, fused = both(lambda x_TD=x_TD: round_trip(ids_TK, x_TD, probs.t(), row_multiple=4))
        for one, other in zip(fused, plain, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("fault", ["halved", "zeroed", "two rows swapped", "another order"])
def test_parity_would_see_a_fault(fault: str) -> None:
    """What the tests above compare is not equal where a kernel is wrong in such a way."""
    ids_TK = IDS["plain"].to(DEVICE)
    x_TD = torch.randn(12, 5, device=DEVICE)
    with choice.implementation("triton"):
        layout = row_map(ids_TK, E)
        rows_RD = permute_with_probs(x_TD, torch.ones(12, 3, device=DEVICE), layout)[0]
        wrong_RD = rows_RD.clone()
        if fault == "halved":
            wrong_RD *= 0.5
        elif fault == "zeroed":
            wrong_RD.zero_()
        elif fault == "two rows swapped":
            wrong_RD[[0, 1]] = rows_RD[[1, 0]]
        else:
            wrong_RD = rows_RD[torch.arange(len(rows_RD) - 1, -1, -1, device=DEVICE)]
        assert not torch.equal(unpermute(wrong_RD, layout), unpermute(rows_RD, layout))


class CountedLaunches:
    """In the place of a kernel: counts what is launched."""

    def __init__(self, kernel: Any, launched: list[str]) -> None:
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid: Any) -> Any:
        self.launched.append(self.kernel.__name__)
        return self.kernel[grid]


def test_four_launches_from_ids_to_rows_and_one_for_each_step_after(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    for module in (kernels, map_kernels):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            monkeypatch.setattr(module, name, CountedLaunches(getattr(module, name), launched))
    ids_TK = IDS["dropped"].to(DEVICE)
    x_TD = torch.randn(12, 5, device=DEVICE, requires_grad=True)
    probs_TK = torch.rand(12, 3, device=DEVICE, requires_grad=True)
    with choice.implementation("triton"):
        layout = row_map(ids_TK, E, capacity_rows=80, row_multiple=8)
        rows_RD, probs_R = permute_with_probs(x_TD, probs_TK, layout)
        assert launched == ["count_choices_kernel", "place_blocks_kernel", "place_choices_kernel", "permute_kernel"]
        unpermute(rows_RD * probs_R[:, None], layout).sum().backward()
    assert launched[4:] == ["unpermute_kernel", "permute_kernel", "unpermute_kernel"]


def test_operators_are_declared_as_they_are() -> None:
    ids_TK = IDS["dropped"].to(DEVICE)
    x_TD, probs_TK = torch.randn(12, 5, device=DEVICE), torch.rand(12, 3, device=DEVICE)
    with choice.implementation("triton"):
        layout = row_map(ids_TK, E, row_multiple=8)
    row_TK, choice_R = layout.row_TK, layout.choice_R
    rows_RD, probs_R = kernels.permute(x_TD, probs_TK, row_TK, choice_R, True)
    checks = ("test_schema", "test_faketensor")
    for operator, arguments in (
        (map_kernels.row_map, (ids_TK, E, 80, 8, None)),
        (map_kernels.row_map, (ids_TK, E, 30, 1, 5)),
        (kernels.permute, (x_TD, probs_TK, row_TK, choice_R, True)),
        (kernels.permute, (x_TD, None, row_TK, choice_R, True)),
        (kernels.unpermute, (rows_RD, probs_R, row_TK)),
        (kernels.unpermute, (rows_RD, None, row_TK)),
    ):
        torch.library.opcheck(operator, arguments, test_utils=checks)
