"""Tests in fp64 are of the plain implementation; the others are of both."""

import pytest
import torch
import torch.nn.functional as F

from moe_kernels import MoeKernelsError, RMSNorm, rms_norm, rms_norm_residual
from moe_kernels.testing import rounding_error

EPS = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.usefixtures("pass_size")
def test_gradcheck() -> None:
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 0.1), (x, weight))


@pytest.mark.parametrize("shape", [(6,), (9, 6), (2, 5, 3, 6), (0, 6)])
@pytest.mark.usefixtures("pass_size")
def test_equals_torch_in_fp64(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(shape, dtype=torch.float64)
    got, expected = rms_norm(x, weight, EPS), F.rms_norm(x, (6,), weight, EPS)
    torch.testing.assert_close(got, expected)
    for one, other in zip(
        torch.autograd.grad(got, (x, weight), grad), torch.autograd.grad(expected, (x, weight), grad), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_views_that_are_not_contiguous() -> None:
    base = torch.randn(6, 4, 8, dtype=torch.float64)
    x = base.transpose(0, 1)[..., ::2].requires_grad_()
    weight = torch.randn(4, dtype=torch.float64)
    got, expected = (f.sum() for f in (rms_norm(x, weight, EPS), F.rms_norm(x, (4,), weight, EPS)))
    torch.testing.assert_close(*(torch.autograd.grad(y, x)[0] for y in (got, expected)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("pass_size")
def test_low_precision_is_rounded_once(dtype: torch.dtype, implementation: str) -> None:
    x = torch.randn(20, 32, device=DEVICE).to(dtype).requires_grad_()
    weight = (1 + torch.rand(32, device=DEVICE)).to(dtype).requires_grad_()
    grad = torch.randn(20, 32, device=DEVICE).to(dtype)
    y = rms_norm(x, weight, EPS)
    grads = torch.autograd.grad(y, (x, weight), grad)
    exact = F.rms_norm(x.double(), (32,), weight.double(), EPS)
    exact_grads = torch.autograd.grad(exact, (x, weight), grad.double())
    rounded_once = rounding_error(dtype, implementation) * (1 + 1e-3)
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= exact.abs().clamp(min=torch.finfo(dtype).tiny) * rounded_once).all()
    for one, other in zip(grads, exact_grads, strict=True):
        assert one.dtype == dtype
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 2 * rounded_once


@pytest.mark.usefixtures("implementation")
def test_only_the_input_the_weight_and_a_number_per_row_are_kept() -> None:
    x = torch.randn(4, 16, 8, device=DEVICE, requires_grad=True)
    weight = torch.rand(8, device=DEVICE, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        rms_norm(x, weight, EPS)
    assert sorted(kept) == [8, 64, 512]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_residual_is_added_and_rounded_before_the_norm(dtype: torch.dtype, implementation: str) -> None:
    leaves = [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in ((3, 7, 32), (3, 7, 32), (32,))]
    grads = [torch.randn(3, 7, 32, device=DEVICE).to(dtype) for _ in range(2)]
    y, total = rms_norm_residual(*leaves, EPS)
    got = torch.autograd.grad((y, total), leaves, grads)
    exact_total = leaves[0].double() + leaves[1].double()
    rounded_once = rounding_error(dtype, implementation) * (1 + 1e-3)
    smallest = torch.finfo(dtype).tiny
    assert ((total.double() - exact_total).abs() <= exact_total.abs().clamp(min=smallest) * rounded_once).all()
    # Of the sum as it was returned: with an unrounded one y would differ from the norm of what the next layer sees.
    exact_leaves = [total.detach().double().requires_grad_(), leaves[2].detach().double().requires_grad_()]
    exact = F.rms_norm(exact_leaves[0], (32,), exact_leaves[1], EPS)
    assert ((y.double() - exact).abs() <= exact.abs().clamp(min=smallest) * max(rounded_once, 1e-6)).all()
    exact_grads = torch.autograd.grad((exact, exact_leaves[0] * 1), exact_leaves, [grad.double() for grad in grads])
    assert torch.equal(got[0], got[1])
    for one, other in zip((got[0], got[2]), exact_grads, strict=True):
        assert one.dtype == dtype
        assert (one.double() - other).norm() <= other.norm() * max(2 * rounded_once, 1e-6)


@pytest.mark.usefixtures("implementation")
def test_either_result_may_go_without_a_gradient() -> None:
    x, residual = (torch.randn(5, 6, device=DEVICE, requires_grad=True) for _ in range(2))
    weight = torch.rand(6, device=DEVICE, requires_grad=True)
    grad = torch.randn(5, 6, device=DEVICE)
    y, total = rms_norm_residual(x, residual, weight, EPS)
    of_total = torch.autograd.grad(total, (x, residual), grad, retain_graph=True)
    assert torch.equal(of_total[0], grad)
    assert torch.equal(of_total[1], grad)
    alone = (x + residual).detach().requires_grad_()
    expected = torch.autograd.grad(rms_norm(alone, weight, EPS), (alone, weight), grad)
    for one, other in zip(torch.autograd.grad(y, (residual, weight), grad), expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("implementation")
def test_of_a_residual_the_sum_is_kept() -> None:
    leaves = [torch.randn(shape, device=DEVICE, requires_grad=True) for shape in ((16, 8), (16, 8), (8,))]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        _, total = rms_norm_residual(*leaves, EPS)
    assert sorted(x.numel() for x in kept) == [8, 16, 128]
    assert total.data_ptr() in {x.data_ptr() for x in kept}


def test_what_does_not_fit_together_is_refused() -> None:
    x, weight = torch.randn(4, 6), torch.ones(6)
    with pytest.raises(MoeKernelsError, match=r"\(5,\) cannot scale rows of 6"):
        rms_norm(x, torch.ones(5), EPS)
    with pytest.raises(MoeKernelsError, match=r"\(1, 6\) in torch.float32 cannot be added to \(4, 6\)"):
        rms_norm_residual(x, x[:1], weight, EPS)
    with pytest.raises(MoeKernelsError, match="same shape and dtype"):
        rms_norm_residual(x, x.bfloat16(), weight, EPS)


@pytest.mark.usefixtures("implementation")
def test_module_equals_llama_of_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    theirs, ours = llama.LlamaRMSNorm(16, eps=EPS).to(DEVICE), RMSNorm(16, EPS, dtype=torch.float32, device=DEVICE)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 7, 16, device=DEVICE)
    torch.testing.assert_close(ours(x), theirs(x))
    assert "16, eps=1e-05" in repr(ours)
