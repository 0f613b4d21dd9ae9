"""WeightWork: the input pass gives nothing of what it leaves, and after the weight pass all is as in one backward."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moe_parallel.pipeline.chunk import Segment, SegmentedChunk
from moe_parallel.pipeline.weight_work import WeightWork


class Holder(nn.Module):
    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def compare(model, function, left, *shape):
    """Run `function(x)` in one backward and split; `left` names what the input pass leaves."""
    x = torch.randn(shape, dtype=torch.float64)
    plain = x.clone().requires_grad_()
    model.zero_grad()
    value = function(plain)
    gradient = torch.randn_like(value)
    value.backward(gradient)
    want = gradients(model)

    model.zero_grad()
    work = WeightWork(dict(model.named_parameters()))
    chunk = SegmentedChunk(
        [Segment("all", tuple(want), lambda x, _: function(x))], lambda _: (x, None), ends=False, weight_work=work
    )
    assert torch.equal(chunk.forward(0, x), value)
    early, late = [], []
    dx = chunk.backward_input(0, gradient, early.extend)
    found = gradients(model)
    for name in want:
        if name in left:
            assert found[name] is None, f"{name} comes later"
        else:
            assert_same(found[name], want[name])
    assert torch.equal(dx, plain.grad)
    chunk.backward_weight(0, late.extend)
    found = gradients(model)
    for name in want:
        assert_same(found[name], want[name])
    assert (set(early), set(late)) == (set(want) - set(left), set(left))
    assert len(early) + len(late) == len(want)


def assert_same(found, want):
    assert (found is None) == (want is None)
    assert found is None or torch.equal(found, want)


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6), (2, 0, 6), (2, 2, 3, 6)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_layers(shape, bias):
    model = nn.Sequential(nn.Linear(6, 4, bias=bias), nn.Tanh(), nn.Linear(4, 3, bias=bias)).double()
    compare(model, model, {"0.weight", "2.weight"}, *shape)


@pytest.mark.parametrize("bias", [True, False])
def test_arguments_by_name(bias):
    model = Holder(w=(4, 6), b=(4,))

    def function(x):
        return F.linear(input=x, weight=model.w, bias=model.b if bias else None) + (0 if bias else 1) * model.b

    compare(model, function, {"w"}, 5, 6)


def test_weights_that_are_views():
    """Heads flattened, a part of a row, a transposed one, a view of a view."""
    model = Holder(heads=(2, 3, 6), part=(8, 6), turned=(6, 4), deep=(2, 2, 6))

    def function(x):
        return (
            F.linear(x, model.heads.flatten(0, 1)).sum(-1)
            + F.linear(x, model.part[2:5]).sum(-1)
            + F.linear(x, model.turned.t()).sum(-1)
            + F.linear(x, model.deep.view(4, 6).view(4, 6)[1:]).sum(-1)
        )

    compare(model, function, {"heads", "part", "turned", "deep"}, 3, 6)


def test_what_is_no_view_of_a_parameter_is_not_left():
    """Products of activations, and weights that are made: their gradient has further to go in the same pass."""
    model = Holder(w=(4, 6), scaled=(4, 6), left=(4, 2), right=(2, 6), top=(2, 6), low=(2, 6))

    def function(x):
        q = F.linear(x, model.w)
        scores = F.linear(q, q)
        made = F.linear(x, model.scaled / model.scaled.norm()) + F.linear(x, model.left @ model.right)
        return F.linear(x, torch.cat([model.top, model.low])) + scores @ made

    compare(model, function, {"w"}, 5, 6)


class InnerGradient(torch.autograd.Function):
    """tanh(x W^T), whose backward differentiates its own forward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.tanh(F.linear(x, weight))

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(torch.tanh(F.linear(x, weight)), (x, weight), gradient)


def test_an_operation_that_differentiates_within_its_backward_leaves_nothing():
    model = Holder(w=(4, 6), outer=(3, 4))
    compare(model, lambda x: F.linear(InnerGradient.apply(x, model.w), model.outer), {"outer"}, 5, 6)


def test_a_parameter_that_is_also_used_elsewhere():
    """Part of its gradient is there before the rest; it is reported with the rest."""
    model = Holder(w=(4, 6))
    x = torch.randn(3, 6, dtype=torch.float64)
    work = WeightWork(dict(model.named_parameters()))

    def function(x, _):
        return F.linear(x, model.w) * model.w.sum()

    chunk = SegmentedChunk([Segment("all", ("w",), function)], lambda _: (x, None), ends=False, weight_work=work)
    y = chunk.forward(0, x)
    reports = []
    chunk.backward_input(0, torch.ones_like(y), reports.append)
    assert reports == []
    assert model.w.grad is not None
    chunk.backward_weight(0, reports.append)
    assert reports == [["w"]]
    found = model.w.grad
    (want,) = torch.autograd.grad(function(x, None).sum(), model.w)
    torch.testing.assert_close(found, want, rtol=1e-13, atol=1e-13)


def test_a_weight_that_is_used_twice():
    model = Holder(w=(6, 6))
    x = torch.randn(3, 6, dtype=torch.float64)
    work = WeightWork(dict(model.named_parameters()))

    def function(x, _=None):
        return F.linear(torch.tanh(F.linear(x, model.w)), model.w)

    chunk = SegmentedChunk([Segment("all", ("w",), function)], lambda _: (x, None), ends=False, weight_work=work)
    y = chunk.forward(0, x)
    chunk.backward_input(0, torch.ones_like(y), lambda names: pytest.fail(f"{names} are left"))
    assert model.w.grad is None
    chunk.backward_weight(0, lambda names: None)
    (want,) = torch.autograd.grad(function(x).sum(), model.w)
    assert torch.equal(model.w.grad, want)


@pytest.mark.parametrize("frozen", ["0.weight", "0.bias", "2.weight", "0", ""])
def test_what_is_frozen_has_no_gradient(frozen):
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.startswith(frozen)))
    left = {name for name, p in model.named_parameters() if p.requires_grad and name.endswith("weight")}
    compare(model, model, left, 5, 6)


def test_a_weight_alone_behind_an_input_without_gradient():
    """Tokens are no floating point: the first layer has no gradient to give back."""
    model = Holder(table=(7, 6), w=(4, 6))
    token = torch.randint(7, (5,))
    work = WeightWork(dict(model.named_parameters()))

    def function(token, _):
        return F.linear(F.one_hot(token, 6).double(), model.w)

    chunk = SegmentedChunk(
        [Segment("all", ("w",), function)], lambda _: (token % 6, None), ends=False, weight_work=work
    )
    y = chunk.forward(0, None)
    assert chunk.backward_input(0, torch.ones_like(y), lambda names: None) is None
    assert model.w.grad is None
    chunk.backward_weight(0, lambda names: None)
    (want,) = torch.autograd.grad(function(token % 6, None).sum(), model.w)
    assert torch.equal(model.w.grad, want)


def test_without_gradients_nothing_is_kept():
    model = nn.Linear(6, 4).double()
    work = WeightWork(dict(model.named_parameters()))
    x = torch.randn(3, 6, dtype=torch.float64)
    with work.collecting(), torch.no_grad():
        y = model(x)
    assert y.grad_fn is None
    assert torch.equal(y, model(x))


def test_a_backward_that_is_not_split_leaves_nothing():
    """Outside `kept_for` a layer that ran inside `collecting` is a plain one."""
    model = nn.Linear(6, 4).double()
    work = WeightWork(dict(model.named_parameters()))
    x = torch.randn(3, 6, dtype=torch.float64)
    with work.collecting():
        y = model(x)
    y.sum().backward()
    found = gradients(model)
    model.zero_grad()
    model(x).sum().backward()
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients(model).items())


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("preserve_rng_state", [True, False])
def test_segments_that_recompute(split, preserve_rng_state):
    """The forward that runs again in the backward keeps what the first kept, and its weight work is left as well."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 6)).double()

    def recomputed(x):
        return checkpoint(model, x, use_reentrant=False, preserve_rng_state=preserve_rng_state)

    if not preserve_rng_state:
        model.eval()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    torch.manual_seed(3)
    plain = x.clone().requires_grad_()
    value = model(plain)
    gradient = torch.randn_like(value)
    value.backward(gradient)
    want = gradients(model)
    model.zero_grad()
    work = WeightWork(dict(model.named_parameters()))
    parts = [Segment("all", tuple(want), lambda x, _: recomputed(x))]
    chunk = SegmentedChunk(parts, lambda _: (x, None), ends=False, weight_work=work)
    torch.manual_seed(3)
    assert torch.equal(chunk.forward(0, x), value)
    if split:
        dx = chunk.backward_input(0, gradient, lambda names: None)
        assert [name for name, found in gradients(model).items() if found is None] == ["0.weight", "3.weight"]
        chunk.backward_weight(0, lambda names: None)
    else:
        dx = chunk.backward(0, gradient, lambda names: None)
    assert torch.equal(dx, plain.grad)
    assert all(torch.equal(found, want[name]) for name, found in gradients(model).items())


def test_microbatches_are_kept_apart():
    """Weight passes in another order than the input passes; each adds its own product."""
    model = nn.Linear(6, 4, bias=False).double()
    work = WeightWork(dict(model.named_parameters()))
    inputs = torch.randn(3, 5, 6, dtype=torch.float64)
    chunk = SegmentedChunk(
        [Segment("all", ("weight",), lambda x, _: model(x))], lambda n: (inputs[n], None), ends=False, weight_work=work
    )
    outputs = [chunk.forward(number, inputs[number]) for number in range(3)]
    for number in range(3):
        chunk.backward_input(number, torch.ones_like(outputs[number]), lambda names: None)
    total = torch.zeros_like(model.weight)
    for number in (1, 0, 2):
        chunk.backward_weight(number, lambda names: None)
        total += torch.ones_like(outputs[number]).t() @ inputs[number]
        torch.testing.assert_close(model.weight.grad, total, rtol=1e-13, atol=1e-13)


def test_a_layer_that_only_some_microbatches_use_is_reported_by_every_later_weight_pass():
    """What left work once is complete only when weight passes are: an earlier one may still be to come."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)}).double()
    work = WeightWork(dict(model.named_parameters()))
    names = tuple(name for name, _ in model.named_parameters())
    x = torch.randn(2, 3, dtype=torch.float64)

    def run(x, number):
        return model["a"](model["b"](x) if number == 0 else x)

    chunk = SegmentedChunk([Segment("all", names, run)], lambda n: (x, n), ends=False, weight_work=work)
    for number in (0, 1):
        y = chunk.forward(number, x)
        early = []
        chunk.backward_input(number, torch.ones_like(y), early.extend)
        assert early == ["a.bias", "b.bias"]
    for number in (0, 1):
        late = []
        chunk.backward_weight(number, late.extend)
        assert late == ["a.weight", "b.weight"]


def test_what_a_product_was_made_from_is_freed_before_the_next_is_there():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    work = WeightWork(dict(model.named_parameters()))
    kept, seen = [], []

    def hook(gradient):
        if gradient is not None:  # torch calls it for what the input pass leaves as well
            seen.append(kept[0]() is None)

    model[0].weight.register_hook(hook)

    def run(x, _):
        hidden = model[0](x)
        kept.append(weakref.ref(hidden.untyped_storage()))
        return model[1](hidden)

    x = torch.randn(2, 3, dtype=torch.float64)
    names = tuple(name for name, _ in model.named_parameters())
    chunk = SegmentedChunk([Segment("all", names, run)], lambda n: (x, None), ends=False, weight_work=work)
    y = chunk.forward(0, x)
    chunk.backward_input(0, torch.ones_like(y), lambda names: None)
    assert kept[0]() is not None, "the input of the second layer waits for its product"
    assert seen == []
    chunk.backward_weight(0, lambda names: None)
    assert seen == [True]
