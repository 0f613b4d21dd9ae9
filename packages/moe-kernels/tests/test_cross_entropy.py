"""Tests in fp64 are of the plain implementation; those with a fixture `implementation` are of both.

Shape legend: T tokens, V vocabulary.
"""

import pytest
import torch
import torch.nn.functional as F

from moe_kernels import MoeKernelsError
from moe_kernels.cross_entropy import cross_entropy
from moe_kernels.testing import rounding_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

smoothings = pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])


@smoothings
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.usefixtures("pass_size")
def test_value_and_gradient_equal_torch(smoothing: float, masked: bool) -> None:
    logits_TV = (3 * torch.randn(13, 11, dtype=torch.float64)).requires_grad_()
    targets_T = torch.randint(0, 11, (13,))
    weight_T = torch.randn(13, dtype=torch.float64)
    valid_T = torch.rand(13) < 0.6 if masked else None
    hf_targets_T = targets_T if valid_T is None else targets_T.masked_fill(~valid_T, -100)
    got = cross_entropy(logits_TV, targets_T, valid_T=valid_T, label_smoothing=smoothing)
    expected = F.cross_entropy(logits_TV, hf_targets_T, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(got, expected)
    grads = [torch.autograd.grad((loss_T * weight_T).sum(), logits_TV)[0] for loss_T in (got, expected)]
    torch.testing.assert_close(*grads)


@smoothings
@pytest.mark.usefixtures("pass_size")
def test_gradcheck(smoothing: float) -> None:
    logits_TV = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    targets_T, valid_T = torch.randint(0, 5, (6,)), torch.tensor([True, True, False, True, False, True])
    assert torch.autograd.gradcheck(
        lambda x: cross_entropy(x, targets_T, valid_T=valid_T, label_smoothing=smoothing), logits_TV
    )


@pytest.mark.parametrize("bad_target", [-100, -1, 11, 10**9])
@pytest.mark.usefixtures("implementation")
def test_invalid_tokens_give_zero_whatever_they_hold(bad_target: int) -> None:
    logits_TV = torch.randn(4, 11, device=DEVICE)
    logits_TV[3] = float("nan")
    logits_TV.requires_grad_()
    targets_T = torch.tensor([1, bad_target, 2, 3], device=DEVICE)
    valid_T = torch.tensor([True, False, True, False], device=DEVICE)
    loss_T = cross_entropy(logits_TV, targets_T, valid_T=valid_T)
    assert loss_T[~valid_T].tolist() == [0, 0]
    (grad_TV,) = torch.autograd.grad(loss_T.sum(), logits_TV)
    assert not grad_TV[~valid_T].any()
    assert grad_TV[valid_T].isfinite().all()
    assert grad_TV[valid_T].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_have_a_loss_in_the_internal_dtype(dtype: torch.dtype, implementation: str) -> None:
    logits_TV = torch.randn(9, 30, device=DEVICE).to(dtype).requires_grad_()
    targets_T = torch.randint(0, 30, (9,), device=DEVICE)
    loss_T = cross_entropy(logits_TV, targets_T)
    assert loss_T.dtype == torch.float32
    exact_TV = logits_TV.detach().double().requires_grad_()
    exact_T = F.cross_entropy(exact_TV, targets_T, reduction="none")
    torch.testing.assert_close(loss_T.double(), exact_T, rtol=1e-6, atol=1e-6)
    (got_TV,), (expected_TV,) = (
        torch.autograd.grad(loss.sum(), x) for loss, x in ((loss_T, logits_TV), (exact_T, exact_TV))
    )
    assert got_TV.dtype == dtype
    # Rounded once, after the fp32 error of the softmax.
    limit = expected_TV.abs() * rounding_error(dtype, implementation) + 1e-6
    assert ((got_TV.double() - expected_TV).abs() <= limit).all()


@pytest.mark.usefixtures("implementation")
def test_the_logits_are_the_only_thing_of_their_size_that_is_kept() -> None:
    logits_TV = torch.randn(16, 64, device=DEVICE).bfloat16().requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        cross_entropy(logits_TV, torch.zeros(16, dtype=torch.int64, device=DEVICE))
    assert [x.data_ptr() for x in kept if x.numel() > 16] == [logits_TV.data_ptr()]


@pytest.mark.usefixtures("implementation")
def test_far_logits_do_not_overflow() -> None:
    logits_TV = torch.tensor([[1e4, 0.0], [-1e4, 0.0]], device=DEVICE)
    assert cross_entropy(logits_TV, torch.tensor([0, 0], device=DEVICE)).tolist() == [0.0, 1e4]


@pytest.mark.usefixtures("implementation")
def test_no_tokens() -> None:
    logits_TV = torch.zeros(0, 5, device=DEVICE, requires_grad=True)
    loss_T = cross_entropy(logits_TV, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert loss_T.shape == (0,)
    assert torch.autograd.grad(loss_T.sum(), logits_TV)[0].shape == (0, 5)


def test_what_cannot_be_a_loss_is_refused() -> None:
    with pytest.raises(MoeKernelsError, match=r"logits \(3, 5\) have a target for each row, not \(2,\)"):
        cross_entropy(torch.zeros(3, 5), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(MoeKernelsError, match=r"not \(3,\) of them and \(1,\) of valid"):
        cross_entropy(torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64), valid_T=torch.ones(1, dtype=torch.bool))
    with pytest.raises(MoeKernelsError, match=r"between 0 and 1, not 1\.5"):
        cross_entropy(torch.zeros(1, 5), torch.zeros(1, dtype=torch.int64), label_smoothing=1.5)
