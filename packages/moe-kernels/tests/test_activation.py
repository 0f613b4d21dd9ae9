"""Shape legend: R rows, F features."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels import gated_activation

KINDS = ("silu", "gelu")
ACT = {"silu": F.silu, "gelu": F.gelu}


def reference(h_RF2: Tensor, probs_R: Tensor | None, kind: str) -> Tensor:
    gate_RF, up_RF = h_RF2.chunk(2, -1)
    a_RF = ACT[kind](gate_RF) * up_RF
    return a_RF if probs_R is None else a_RF * probs_R[:, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.usefixtures("pass_size")
def test_gradcheck(kind: Any, weighted: bool) -> None:
    h_RF2 = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    probs_R = torch.rand(7, dtype=torch.float64, requires_grad=True) if weighted else None
    inputs = [h_RF2] if probs_R is None else [h_RF2, probs_R]
    assert torch.autograd.gradcheck(lambda h, p=None: gated_activation(h, p, kind), inputs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.usefixtures("pass_size")
def test_value_and_gradients_in_fp64(kind: Any, weighted: bool) -> None:
    h_RF2 = (3 * torch.randn(50, 16, dtype=torch.float64)).requires_grad_()
    probs_R = torch.rand(50, dtype=torch.float64, requires_grad=True) if weighted else None
    inputs = [h_RF2] if probs_R is None else [h_RF2, probs_R]
    weight_RF = torch.randn(50, 8, dtype=torch.float64)
    got, expected = gated_activation(h_RF2, probs_R, kind), reference(h_RF2, probs_R, kind)
    torch.testing.assert_close(got, expected)
    for one, other in zip(
        torch.autograd.grad((got * weight_RF).sum(), inputs),
        torch.autograd.grad((expected * weight_RF).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("pass_size")
def test_low_precision_is_rounded_once(dtype: torch.dtype, kind: Any) -> None:
    h_RF2 = torch.randn(40, 32).to(dtype).requires_grad_()
    probs_R = torch.rand(40, requires_grad=True)
    grad_RF = torch.randn(40, 16).to(dtype)
    a_RF = gated_activation(h_RF2, probs_R, kind)
    grads = torch.autograd.grad(a_RF, (h_RF2, probs_R), grad_RF)
    exact_leaves = [x.detach().double().requires_grad_() for x in (h_RF2, probs_R)]
    exact_RF = reference(exact_leaves[0], exact_leaves[1], kind)
    exact_grads = torch.autograd.grad(exact_RF, exact_leaves, grad_RF.double())
    assert (a_RF.dtype, grads[0].dtype, grads[1].dtype) == (dtype, dtype, torch.float32)
    for got, exact in ((a_RF, exact_RF), (grads[0], exact_grads[0])):
        # Half a unit in the last place, and the fp32 error where terms cancel.
        limit = exact.abs() * (torch.finfo(dtype).eps / 2) + 1e-6
        assert ((got.double() - exact).abs() <= limit).all()
    torch.testing.assert_close(grads[1].double(), exact_grads[1], rtol=1e-5, atol=1e-5)  # as exact as fp32


def test_only_the_input_and_the_probabilities_are_kept() -> None:
    h_RF2 = torch.randn(64, 32, requires_grad=True)
    probs_R = torch.rand(64, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        gated_activation(h_RF2, probs_R, "silu")
    assert {x.data_ptr() for x in kept} == {h_RF2.data_ptr(), probs_R.data_ptr()}


def test_zero_probability_still_has_a_gradient() -> None:
    h_RF2 = torch.randn(3, 8, dtype=torch.float64)
    probs_R = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (grad_R,) = torch.autograd.grad(gated_activation(h_RF2, probs_R, "silu").sum(), probs_R)
    torch.testing.assert_close(grad_R, reference(h_RF2, None, "silu").sum(-1))


def test_no_rows_and_a_gradient_of_stride_zero() -> None:
    empty_RF2 = torch.randn(0, 8, requires_grad=True)
    gated_activation(empty_RF2, torch.rand(0), "silu").sum().backward()
    assert empty_RF2.grad is not None
    assert empty_RF2.grad.shape == (0, 8)
    h_RF2 = torch.randn(4, 8, requires_grad=True)
    grads = [
        torch.autograd.grad(function(h_RF2, None, "silu").sum(), h_RF2)[0] for function in (gated_activation, reference)
    ]
    torch.testing.assert_close(*grads)
