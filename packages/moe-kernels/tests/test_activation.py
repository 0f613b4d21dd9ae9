"""Tests in fp64 are of the plain implementation; the others are of both. Shape legend: R rows, F features."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_kernels import MoeKernelsError, gated_activation
from moe_kernels.testing import rounding_error

KINDS = ("silu", "gelu")
ACT = {"silu": F.silu, "gelu": F.gelu}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


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
def test_low_precision_is_rounded_once(dtype: torch.dtype, kind: Any, implementation: str) -> None:
    h_RF2 = torch.randn(40, 32, device=DEVICE).to(dtype).requires_grad_()
    probs_R = torch.rand(40, device=DEVICE, requires_grad=True)
    grad_RF = torch.randn(40, 16, device=DEVICE).to(dtype)
    a_RF = gated_activation(h_RF2, probs_R, kind)
    grads = torch.autograd.grad(a_RF, (h_RF2, probs_R), grad_RF)
    exact_leaves = [x.detach().double().requires_grad_() for x in (h_RF2, probs_R)]
    exact_RF = reference(exact_leaves[0], exact_leaves[1], kind)
    exact_grads = torch.autograd.grad(exact_RF, exact_leaves, grad_RF.double())
    assert (a_RF.dtype, grads[0].dtype, grads[1].dtype) == (dtype, dtype, torch.float32)
    for got, exact in ((a_RF, exact_RF), (grads[0], exact_grads[0])):
        # And the fp32 error where terms cancel.
        limit = exact.abs() * rounding_error(dtype, implementation) + 1e-6
        assert ((got.double() - exact).abs() <= limit).all()
    torch.testing.assert_close(grads[1].double(), exact_grads[1], rtol=1e-5, atol=1e-5)  # as exact as fp32


@pytest.mark.usefixtures("implementation")
def test_only_the_input_and_the_probabilities_are_kept() -> None:
    h_RF2 = torch.randn(64, 32, device=DEVICE, requires_grad=True)
    probs_R = torch.rand(64, device=DEVICE, requires_grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        gated_activation(h_RF2, probs_R, "silu")
    assert {x.data_ptr() for x in kept} == {h_RF2.data_ptr(), probs_R.data_ptr()}


@pytest.mark.usefixtures("implementation")
def test_zero_probability_still_has_a_gradient() -> None:
    h_RF2 = torch.randn(3, 8, device=DEVICE)
    probs_R = torch.zeros(3, device=DEVICE, requires_grad=True)
    (grad_R,) = torch.autograd.grad(gated_activation(h_RF2, probs_R, "silu").sum(), probs_R)
    torch.testing.assert_close(grad_R, reference(h_RF2, None, "silu").sum(-1))


@pytest.mark.usefixtures("implementation")
def test_no_rows_and_a_gradient_of_stride_zero() -> None:
    empty_RF2 = torch.randn(0, 8, device=DEVICE, requires_grad=True)
    gated_activation(empty_RF2, torch.rand(0, device=DEVICE), "silu").sum().backward()
    assert empty_RF2.grad is not None
    assert empty_RF2.grad.shape == (0, 8)
    h_RF2 = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    grads = [
        torch.autograd.grad(function(h_RF2, None, "silu").sum(), h_RF2)[0] for function in (gated_activation, reference)
    ]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_rows", [0, 3, 9])
@pytest.mark.usefixtures("implementation", "pass_size")
def test_rows_after_the_last_give_zeros_whatever_they_hold(kind: Any, weighted: bool, num_rows: int) -> None:
    h_RF2, probs_R = torch.randn(9, 12, device=DEVICE), torch.rand(9, device=DEVICE) if weighted else None
    grad_RF = torch.randn(9, 6, device=DEVICE)
    for tensor in (h_RF2, probs_R, grad_RF):
        if tensor is not None:
            tensor[num_rows:] = float("nan")
    inputs = [tensor.requires_grad_() for tensor in (h_RF2, probs_R) if tensor is not None]
    offsets_E = torch.tensor([num_rows // 2, num_rows], dtype=torch.int32, device=DEVICE)
    a_RF = gated_activation(h_RF2, probs_R, kind, rows=offsets_E[-1:])
    got = (a_RF, *torch.autograd.grad(a_RF, inputs, grad_RF))
    few = [tensor[:num_rows].detach().requires_grad_() for tensor in inputs]
    a_few_RF = gated_activation(few[0], few[1] if weighted else None, kind)
    for all_rows, few_rows in zip(
        got, (a_few_RF, *torch.autograd.grad(a_few_RF, few, grad_RF[:num_rows])), strict=True
    ):
        assert torch.equal(all_rows[:num_rows], few_rows)
        assert not all_rows[num_rows:].any()


def test_what_cannot_be_halved_or_weighted_is_refused() -> None:
    with pytest.raises(MoeKernelsError, match=r"not \(3, 7\)$"):
        gated_activation(torch.zeros(3, 7), None, "silu")
    with pytest.raises(MoeKernelsError, match=r"not \(3, 8\) with \(2,\) probabilities"):
        gated_activation(torch.zeros(3, 8), torch.zeros(2), "silu")
