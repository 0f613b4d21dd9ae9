import pytest
import torch
import torch.nn.functional as F

from moe_kernels import RMSNorm, rms_norm

EPS = 1e-5


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
def test_low_precision_is_rounded_once(dtype: torch.dtype) -> None:
    x = torch.randn(20, 32).to(dtype).requires_grad_()
    weight = (1 + torch.rand(32)).to(dtype).requires_grad_()
    grad = torch.randn(20, 32).to(dtype)
    y = rms_norm(x, weight, EPS)
    grads = torch.autograd.grad(y, (x, weight), grad)
    exact = F.rms_norm(x.double(), (32,), weight.double(), EPS)
    exact_grads = torch.autograd.grad(exact, (x, weight), grad.double())
    half_ulp = torch.finfo(dtype).eps / 2 * (1 + 1e-3)
    assert y.dtype == dtype
    assert ((y.double() - exact).abs() <= exact.abs() * half_ulp).all()
    for one, other in zip(grads, exact_grads, strict=True):
        assert one.dtype == dtype
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error < 2 * half_ulp


def test_only_the_input_the_weight_and_a_number_per_row_are_kept() -> None:
    x = torch.randn(4, 16, 8, requires_grad=True)
    weight = torch.rand(8, requires_grad=True)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        rms_norm(x, weight, EPS)
    assert sorted(kept) == [8, 64, 512]


def test_module_equals_llama_of_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    theirs, ours = llama.LlamaRMSNorm(16, eps=EPS), RMSNorm(16, EPS, dtype=torch.float32)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 7, 16)
    torch.testing.assert_close(ours(x), theirs(x))
    assert "16, eps=1e-05" in repr(ours)
