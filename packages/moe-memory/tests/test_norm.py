"""One norm for the whole model, and the factor that clips to it."""

from math import fsum, inf, nan, sqrt

import pytest
import torch

from moe_memory import MoeMemoryError, clip_factor
from moe_memory.data_parallel.norm import power_sum
from moe_parallel import AxisGroups, reduce_norm_parts


def global_norm(parts, order):
    return reduce_norm_parts(parts, order, AxisGroups())


def parts_of(dense, experts, order):
    return {"dense": power_sum(dense, order), "expert": power_sum(experts, order)}


def test_r057_expert_parts_of_two_ranks_give_one_norm():
    """Squared norms 20 and 100: the norm is sqrt(120) = 10.9545, not the average of both norms, 7.2361."""
    ranks = [torch.tensor([2.0, 4.0]), torch.tensor([6.0, -8.0])]
    reduced = {"dense": power_sum(torch.zeros(3), 2.0), "expert": sum(power_sum(rank, 2.0) for rank in ranks)}
    norm = global_norm(reduced, 2.0)
    assert float(norm) == pytest.approx(sqrt(120), rel=1e-7)
    assert f"{float(norm):.4f}" == "10.9545"
    assert f"{float(sum(rank.norm() for rank in ranks)) / 2:.4f}" == "7.2361"


def test_r057_inf_norm_is_the_largest_entry_of_all():
    ranks = [torch.tensor([2.0, 4.0]), torch.tensor([6.0, -8.0])]
    largest = torch.stack([power_sum(rank, inf) for rank in ranks]).amax()
    assert float(global_norm({"dense": power_sum(torch.tensor([7.0]), inf), "expert": largest}, inf)) == 8.0


def test_r057_a_rank_without_experts_adds_nothing():
    dense = torch.tensor([3.0, 4.0])
    for order, expected in ((2.0, 5.0), (1.0, 7.0), (inf, 4.0)):
        norm = global_norm(parts_of(dense, torch.zeros(0), order), order)
        assert norm.dtype == torch.float64
        assert norm.shape == ()
        assert float(norm) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, inf])
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_power_sum_is_exact_at_every_size(order, size, dtype):
    x = torch.randn(size, dtype=dtype)
    values = [abs(value) for value in x.tolist()]
    exact = max(values, default=0.0) if order == inf else fsum(value**order for value in values)
    # A row of 1024 is added up in the dtype of x, in any order.
    rounding = 64 * torch.finfo(dtype).eps
    assert float(power_sum(x, order)) == pytest.approx(exact, rel=rounding)
    shape = (5, size // 5) if size % 5 == 0 else (size, 1)
    assert torch.equal(power_sum(x.view(shape), order), power_sum(x, order))


def test_power_sum_of_a_long_float32_tensor_is_as_good_as_float64():
    x = torch.randn(4_000_000)
    assert float(power_sum(x, 2.0)) == pytest.approx(float(x.double().square().sum()), rel=1e-8)


@pytest.mark.parametrize("bad", [nan, inf, -inf])
@pytest.mark.parametrize("order", [1.0, 2.0, inf])
@pytest.mark.parametrize("place", [0, 1500])
def test_one_bad_entry_makes_the_norm_not_finite(bad, order, place):
    x = torch.ones(2000)
    x[place] = bad
    assert not global_norm(parts_of(torch.ones(3), x, order), order).isfinite()


@pytest.mark.parametrize("order", [0.0, -1.0, nan])
def test_orders_that_are_no_norm_are_refused(order):
    with pytest.raises(MoeMemoryError, match="order of a gradient norm must be above 0"):
        power_sum(torch.ones(2), order)


@pytest.mark.parametrize(("norm", "expected"), [(4.0, 0.5 / (1 + 2.5e-7)), (1.0, 1.0), (0.0, 1.0), (inf, 0.0)])
def test_clip_factor(norm, expected):
    factor = clip_factor(torch.tensor(norm, dtype=torch.float64), 2.0)
    assert float(factor) == pytest.approx(expected, rel=1e-12)
    assert factor.shape == ()


def test_clip_factor_is_that_of_torch():
    parameters = [torch.nn.Parameter(torch.randn(5)), torch.nn.Parameter(torch.randn(3, 2))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 3
    before = [parameter.grad.clone() for parameter in parameters]
    norm = global_norm(parts_of(before[0], before[1], 2.0), 2.0)
    theirs = torch.nn.utils.clip_grad_norm_(parameters, 1.5)
    assert float(norm) == pytest.approx(float(theirs), rel=1e-6)
    for parameter, gradient in zip(parameters, before, strict=True):
        torch.testing.assert_close(gradient * clip_factor(norm, 1.5), parameter.grad)


def test_a_norm_that_is_nan_gives_no_usable_factor():
    assert clip_factor(torch.tensor(nan), 1.0).isnan()
