"""What is used of torch beyond its public interface still does what it did."""

import pytest
import torch

from moe_memory._torch_compat import in_backward, withhold, write_count


def test_write_count_sees_writes_through_views_and_not_those_of_data_aliases():
    base = torch.zeros(6)
    view, alias = base[:3], base[3:].data
    counts = write_count(base), write_count(alias)
    view.add_(1)
    assert write_count(base) == write_count(view) == counts[0] + 1
    assert write_count(alias) == counts[1]
    alias.add_(1)
    assert write_count(alias) == counts[1] + 1
    assert base.tolist() == [1.0] * 6


def test_autograd_writes_into_an_alias_that_is_the_gradient():
    bucket = torch.zeros(4)
    parameter = torch.nn.Parameter(torch.ones(2))
    gradient = bucket[2:].data
    parameter.grad = gradient
    before = write_count(gradient)
    (parameter * 3).sum().backward()
    assert parameter.grad is gradient
    assert write_count(gradient) > before
    assert bucket.tolist() == [0, 0, 3, 3]


def test_a_forward_inside_a_backward_is_known():
    seen = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(in_backward())
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(in_backward())
            return gradient

    Watch.apply(torch.ones(2, requires_grad=True)).sum().backward()
    assert seen == [False, True]
    assert not in_backward()


def test_a_backward_may_read_what_is_withheld_when_that_is_over_and_not_before():
    x = torch.ones(4, requires_grad=True)
    base = x * 2
    loss = base[1:].square().sum() + base.detach().mul(x).sum()
    counts = write_count(base)
    outer = withhold([base, base[:2]])
    inner = withhold([base[2:]])
    inner()
    with pytest.raises(RuntimeError, match="needed for gradient computation has been modified"):
        loss.backward(retain_graph=True)
    outer()
    assert write_count(base) == counts
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2, 10, 10, 10]
