"""weight_gradients_to: who asks for it gets the products that are gradients of weights, and nothing else changes.

Shape legend: R rows, E experts, K and N features.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_kernels.grouped_gemm import GroupedGemm, grouped_gemm
from moe_kernels.grouped_gemm.autograd import weight_gradients_to
from moe_kernels.grouped_gemm.loop_backend import LoopGroupedGemm
from moe_kernels.grouped_gemm.torch_backend import TorchGroupedGemm

backends = pytest.mark.parametrize("backend", [LoopGroupedGemm(), TorchGroupedGemm()], ids=["loop", "torch"])


class Later:
    """Keeps what it is offered, or refuses it."""

    def __init__(self, takes: bool = True) -> None:
        self.takes = takes
        self.left: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def later(self, weight: Tensor, gradient: Callable[[], Tensor]) -> bool:
        if self.takes:
            self.left.append((weight, gradient))
        return self.takes


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    x_RK, w_EKN = torch.randn(9, 8, requires_grad=True), torch.randn(3, 8, 16, requires_grad=True)
    return x_RK, w_EKN, torch.tensor([3, 3, 8], dtype=torch.int32)


def gradients(x_RK: Tensor, w_EKN: Tensor, y_RN: Tensor, grad_RN: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x_RK.grad = w_EKN.grad = None
    y_RN.backward(grad_RN)
    return x_RK.grad, w_EKN.grad


@backends
@pytest.mark.parametrize("recompute", [False, True])
def test_a_product_that_is_left_is_the_gradient_bit_for_bit(backend: GroupedGemm, recompute: bool) -> None:
    x_RK, w_EKN, offsets_E = drawn()
    grad_RN = torch.randn(9, 16)
    dx_RK, dw_EKN = gradients(x_RK, w_EKN, grouped_gemm(x_RK, w_EKN, offsets_E, backend), grad_RN)
    later = Later()
    with weight_gradients_to(later):
        if recompute:
            y_RN = checkpoint(grouped_gemm, x_RK, w_EKN, offsets_E, backend, use_reentrant=False)
        else:
            y_RN = grouped_gemm(x_RK, w_EKN, offsets_E, backend)
    dx_later, dw_later = gradients(x_RK, w_EKN, y_RN, grad_RN)
    assert dx_RK is not None and dw_EKN is not None and dx_later is not None  # noqa: PT018
    assert torch.equal(dx_later, dx_RK)
    assert dw_later is None
    [(weight, gradient)] = later.left
    assert weight is w_EKN
    with torch.no_grad():
        assert torch.equal(gradient(), dw_EKN)


@backends
def test_the_weight_that_is_given_leads_to_the_parameter(backend: GroupedGemm) -> None:
    """A view of it, as of gate and up projection in a dim of their own, is given as the view."""
    x_RK, _, offsets_E = drawn()
    w_EK2N = torch.randn(3, 8, 2, 8, requires_grad=True)
    later = Later()
    with weight_gradients_to(later):
        y_RN = grouped_gemm(x_RK, w_EK2N.flatten(2), offsets_E, backend)
    y_RN.sum().backward()
    assert w_EK2N.grad is None
    [(weight, gradient)] = later.left
    with torch.no_grad():
        product = gradient()
    torch.autograd.backward(weight, product)
    expected = torch.autograd.grad(grouped_gemm(x_RK, w_EK2N.flatten(2), offsets_E, backend).sum(), w_EK2N)[0]
    assert torch.equal(w_EK2N.grad, expected)


@backends
def test_who_refuses_gets_plain_gradients(backend: GroupedGemm) -> None:
    x_RK, w_EKN, offsets_E = drawn()
    grad_RN = torch.randn(9, 16)
    want = gradients(x_RK, w_EKN, grouped_gemm(x_RK, w_EKN, offsets_E, backend), grad_RN)
    with weight_gradients_to(Later(takes=False)):
        y_RN = grouped_gemm(x_RK, w_EKN, offsets_E, backend)
    found = gradients(x_RK, w_EKN, y_RN, grad_RN)
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(found, want, strict=True))


@backends
def test_frozen_weights_are_not_offered(backend: GroupedGemm) -> None:
    x_RK, w_EKN, offsets_E = drawn()
    w_EKN.requires_grad_(False)
    later = Later()
    with weight_gradients_to(later):
        y_RN = grouped_gemm(x_RK, w_EKN, offsets_E, backend)
    y_RN.sum().backward()
    assert later.left == []
    assert x_RK.grad is not None


def test_it_holds_for_forwards_inside_whenever_their_backward_is() -> None:
    backend, (x_RK, w_EKN, offsets_E) = LoopGroupedGemm(), drawn()
    outer, inner = Later(), Later()
    before = grouped_gemm(x_RK, w_EKN, offsets_E, backend)
    with weight_gradients_to(outer):
        first = grouped_gemm(x_RK, w_EKN, offsets_E, backend)
        with weight_gradients_to(inner):
            second = grouped_gemm(x_RK, w_EKN, offsets_E, backend)
        third = grouped_gemm(x_RK, w_EKN, offsets_E, backend)
        before.sum().backward()
    assert (len(outer.left), len(inner.left)) == (0, 0)
    for y_RN in (first, second, third):
        y_RN.sum().backward()
    assert (len(outer.left), len(inner.left)) == (2, 1)
