"""Outputs that are freed between their consumer and its backward: the same bits, less memory, nothing left behind."""

import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_kernels import gated_activation
from moe_kernels.norm import RMSNorm
from moe_memory import KEPT_UNITS, LayerUnits, LiveBytes, MoeMemoryError, SavedBytes, activation_policy
from moe_memory.recompute_outputs import discard_outputs

ROWS, FEATURES = 24, 10


def weight(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def feed_forward(units, x, w1, w2):
    """Two products around an activation."""
    h = x @ w1
    a = gated_activation(h, None, "silu")
    y = a @ w2
    units.consumed("moe_act", (a,), y, lambda h: gated_activation(h, None, "silu"), h)
    return y


def discarding(*units):
    return LayerUnits(activation_policy(units), "layers.0")


def gradients(y, *inputs):
    return torch.autograd.grad(y.square().sum(), inputs)


def test_values_and_gradients_are_those_of_a_plain_run_and_the_output_is_not_kept():
    leaves = weight(ROWS, FEATURES), weight(FEATURES, 2 * FEATURES), weight(FEATURES, FEATURES)
    found = {}
    for units in (KEPT_UNITS, discarding("moe_act")):
        with SavedBytes(leaves) as saved:
            y = feed_forward(units, *leaves)
        found[units] = (saved.total_bytes, y.detach().clone(), gradients(y, *leaves))
    (plain_bytes, *plain), (bytes_kept, *values) = found.values()
    assert plain_bytes - bytes_kept == ROWS * FEATURES * 8
    assert torch.equal(values[0], plain[0])
    for mine, theirs in zip(values[1], plain[1], strict=True):
        assert torch.equal(mine, theirs)


def test_the_storage_is_empty_in_between_and_as_before_in_the_backward():
    """No version is counted up: autograd would refuse the tensor that the consumer saved."""
    norm = RMSNorm(FEATURES, 1e-6, dtype=torch.float64)
    nn.init.ones_(norm.weight)
    x, w = weight(ROWS, FEATURES), weight(FEATURES, FEATURES)
    normed = norm(x)
    before, version, view = normed.detach().clone(), normed._version, normed[3:]
    y = normed @ w
    sizes = []
    y.register_hook(lambda _: sizes.append(view.untyped_storage().nbytes()))
    discard_outputs((normed,), y, norm, (x,))
    y.register_hook(lambda _: sizes.append(view.untyped_storage().nbytes()))
    assert normed.untyped_storage().nbytes() == 0
    y.sum().backward(retain_graph=True)
    assert sizes == [0, ROWS * FEATURES * 8]
    assert torch.equal(normed, before)
    assert torch.equal(view, before[3:])
    assert normed._version == version
    first = w.grad.clone()
    y.sum().backward()
    assert torch.equal(w.grad, 2 * first)


def test_views_of_one_storage_return_with_it():
    """Keys and values are parts of one product: freeing one frees both."""
    x, w = weight(ROWS, FEATURES), weight(FEATURES, 2 * FEATURES)

    def parts(x):
        return (x @ w).split(FEATURES, -1)

    found = []
    for discards in (False, True):
        k, v = parts(x)
        y = torch.tanh(k * v)
        if discards:
            discard_outputs((k, v), y, parts, (x,))
            assert v.untyped_storage().nbytes() == 0
        found.append(gradients(y, x, w))
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert torch.equal(mine, theirs)


def test_a_chain_is_filled_from_its_end_and_each_output_dies_with_its_consumer():
    """Two layers: while the first is differentiated nothing of the second is left."""
    leaves = [weight(FEATURES, 2 * FEATURES), weight(FEATURES, FEATURES)]
    x = weight(ROWS, FEATURES)
    storages, alive = [], []
    y = x
    for _ in range(2):
        h = y @ leaves[0]
        a = gated_activation(h, None, "silu")
        y = a @ leaves[1]
        storages.append(weakref.ref(a.untyped_storage()))
        discard_outputs((a,), y, lambda h: gated_activation(h, None, "silu"), (h,))
        y.register_hook(lambda _: alive.append([storage() is not None for storage in storages]))
        del h, a
    y.sum().backward()
    assert alive == [[True, True], [True, False]]


def test_a_consumer_that_is_recomputed_finds_its_input():
    """An ordinary unit keeps its input, which is the output that was freed."""
    x, w = weight(ROWS, FEATURES), weight(FEATURES, FEATURES)
    norm = RMSNorm(FEATURES, 1e-6, dtype=torch.float64)
    nn.init.ones_(norm.weight)
    found = []
    for units in (KEPT_UNITS, discarding("layernorm", "core_attn")):
        normed = norm(x)
        y = units.run("core_attn", lambda _, n: torch.tanh(torch.tanh(n @ w) @ w), normed)
        units.consumed("layernorm", (normed,), y, norm, x)
        found.append(gradients(y, x, w, norm.weight))
    assert normed.untyped_storage().nbytes() == ROWS * FEATURES * 8
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("entries", [("moe_act@layers.1",), ("moe_act@mtp.*", "layernorm"), ("moe_act@layers.1*",)])
def test_other_units_and_other_layers_keep_their_outputs(entries):
    leaves = weight(ROWS, FEATURES), weight(FEATURES, 2 * FEATURES), weight(FEATURES, FEATURES)
    kept = []
    for units in (KEPT_UNITS, LayerUnits(activation_policy(entries), "layers.0")):
        with SavedBytes(leaves) as saved:
            feed_forward(units, *leaves)
        kept.append(saved.total_bytes)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("entries", [("moe_act@layers.0",), ("moe_act@layers.[01]",), ("core_attn", "moe_act@*.0")])
def test_a_pattern_chooses_layers(entries):
    leaves = weight(ROWS, FEATURES), weight(FEATURES, 2 * FEATURES), weight(FEATURES, FEATURES)
    with SavedBytes(leaves) as saved:
        feed_forward(LayerUnits(activation_policy(entries), "layers.0"), *leaves)
    assert saved.total_bytes == 2 * ROWS * FEATURES * 8


@pytest.mark.parametrize("frozen", [False, True])
def test_where_nothing_is_differentiated_nothing_happens(frozen):
    leaves = weight(ROWS, FEATURES), weight(FEATURES, 2 * FEATURES), weight(FEATURES, FEATURES)
    if frozen:
        leaves = tuple(leaf.detach() for leaf in leaves)
    calls = []
    with torch.set_grad_enabled(frozen):
        a = gated_activation(leaves[0] @ leaves[1], None, "silu")
        y = a @ leaves[2]
        discard_outputs((a,), y, calls.append, (leaves[0],))
    assert a.untyped_storage().nbytes() == ROWS * FEATURES * 8
    assert not calls


def test_live_memory_falls_with_it():
    x, w = weight(4096, FEATURES), weight(FEATURES, FEATURES)
    with LiveBytes([x, w]) as live:
        a = torch.square(x)
        y = F.linear(a, w)
        held = live.live_bytes
        discard_outputs((a,), y, torch.square, (x,))
        assert held - live.live_bytes == 4096 * FEATURES * 8
        y.sum().backward()
        del y
        assert live.live_bytes >= 4096 * FEATURES * 8
        del a
        assert live.live_bytes == 2 * (x.numel() + w.numel()) * 8


def test_outputs_that_share_memory_with_what_stays_are_refused():
    x = weight(ROWS, FEATURES)
    total = x * 2
    message = "shares memory"
    with pytest.raises(MoeMemoryError, match=message):
        discard_outputs((total[1:],), torch.tanh(total), lambda t: t[1:], (total,))
    with pytest.raises(MoeMemoryError, match=message):
        discard_outputs((total,), total.view(-1), torch.tanh, (x,))
    assert total.untyped_storage().nbytes() == ROWS * FEATURES * 8


@pytest.mark.parametrize(
    ("again", "message"),
    [
        (lambda x: torch.tanh(x[1:]), r"are 1: \[23, 10\].* and in the forward they were 1: \[24, 10\]"),
        (lambda x: torch.tanh(x).t().contiguous().t(), r"strides \(1, 24\).* and in the forward .*strides \(10, 1\)"),
        (lambda x: torch.tanh(x).view(10, 24), r"are .*\[10, 24\]"),
        (lambda x: torch.tanh(x).view(torch.int64), r"are .*int64"),
        (lambda x: (torch.tanh(x), torch.tanh(x)), "are 2: .* and in the forward they were 1: "),
        (lambda x: F.dropout(torch.tanh(x), 0.5), "drew random numbers"),
    ],
    ids=["rows", "strides", "shape", "dtype", "number", "random"],
)
def test_other_outputs_in_the_backward_are_an_error(again, message):
    x, w = weight(ROWS, FEATURES), weight(FEATURES, FEATURES)
    a = torch.tanh(x)
    y = a @ w
    discard_outputs((a,), y, again, (x,))
    with pytest.raises(MoeMemoryError, match=message):
        y.sum().backward()


def test_an_output_that_is_read_again_has_its_value_or_is_an_error():
    """A residual reads nothing; what needs the value finds it behind the consumer's gradient, and not before."""
    x, w = weight(ROWS, FEATURES), weight(FEATURES, FEATURES)

    def outputs(discards):
        a = torch.tanh(x)
        squared, y = a[2:].square(), a @ w
        if discards:
            discard_outputs((a,), y, torch.tanh, (x,))
        return a, squared, y

    found = []
    for discards in (False, True):
        _, squared, y = outputs(discards)
        # The consumer's gradient comes first, since it comes from what was made of the other.
        found.append(gradients(torch.cat((y[2:] * squared.detach(), squared)) + y.sum(), x, w))
    for mine, theirs in zip(found[1], found[0], strict=True):
        assert torch.equal(mine, theirs)
    a, squared, y = outputs(True)
    with pytest.raises(RuntimeError, match="needed for gradient computation has been modified"):
        squared.sum().backward()
    assert a.untyped_storage().nbytes() == 0
    assert torch.equal(gradients(y, w)[0], gradients(outputs(False)[2], w)[0])


def test_an_output_of_two_units_is_refused():
    x, w = weight(ROWS, FEATURES), weight(FEATURES, FEATURES)
    a = torch.tanh(x)
    y, z = a @ w, a @ w.t()
    discard_outputs((a,), y, torch.tanh, (x,))
    with pytest.raises(MoeMemoryError, match="has been freed already"):
        discard_outputs((a,), z, torch.tanh, (x,))


def test_outputs_without_rows_and_with_gaps_are_made_again():
    """A rank without tokens, and views that do not lie in a row."""
    w = weight(FEATURES, FEATURES)

    def gaps(x):
        return torch.tanh(torch.cat((x, x), -1))[:, ::2]

    for rows, make in ((0, torch.tanh), (ROWS, gaps), (ROWS, lambda x: torch.tanh(x.t()).t())):
        x, found = weight(rows, FEATURES), []
        for discards in (False, True):
            a = make(x)
            y = a @ w
            if discards:
                discard_outputs((a,), y, make, (x,))
                assert a.untyped_storage().nbytes() == 0
            found.append(gradients(y, x, w))
        for mine, theirs in zip(found[1], found[0], strict=True):
            assert torch.equal(mine, theirs)


def test_tensors_without_memory_are_made_again_too():
    """As where a model runs to be measured."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        x, w = weight(ROWS, FEATURES), weight(FEATURES, FEATURES)
        a = torch.tanh(x)
        y = a @ w
        discard_outputs((a,), y, torch.tanh, (x,))
        assert a.untyped_storage().nbytes() == 0
        assert [gradient.shape for gradient in gradients(y, x, w)] == [x.shape, w.shape]
    assert a.untyped_storage().nbytes() == ROWS * FEATURES * 8


def test_what_is_kept_must_not_be_written():
    x, w = weight(ROWS, FEATURES), weight(FEATURES, FEATURES)
    h = x * 2
    a = torch.tanh(h.detach()).requires_grad_()
    y = a @ w
    discard_outputs((a,), y, torch.tanh, (h,))
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="needed for gradient computation has been modified"):
        y.sum().backward()


@pytest.mark.parametrize("backward", [True, False])
def test_fifty_steps_leave_nothing_behind(backward):
    leaves = weight(ROWS, FEATURES), weight(FEATURES, 2 * FEATURES), weight(FEATURES, FEATURES)
    alive = weakref.WeakSet()
    units = discarding("moe_act")

    class Watching:
        """Watches what is freed, what it is made from and what was made of it."""

        def consumed(self, unit, outputs, before, again, *kept):
            alive.update(tensor.untyped_storage() for tensor in (*outputs, before, *kept))
            units.consumed(unit, outputs, before, again, *kept)

    feed_forward(units, *leaves).sum().backward()
    gc.collect()
    gc.disable()
    try:
        for step in range(50):
            y = feed_forward(Watching(), *leaves)
            assert len(alive) == 3
            if backward:
                y.sum().backward()
            del y
            assert len(alive) == 0, f"step {step}"
    finally:
        gc.enable()


def test_r079_experts_without_tokens_save_as_many_tensors_as_others():
    """What is freed and what is saved depends on the number of rows and not on whose they are."""
    w1, w2 = weight(3, FEATURES, 2 * FEATURES), weight(3, FEATURES, FEATURES)
    found = []
    for counts in ((8, 8, 8), (24, 0, 0), (0, 24, 0)):
        x = weight(ROWS, FEATURES)
        with SavedBytes((w1, w2, x)) as saved:
            h = torch.cat([rows @ w for rows, w in zip(x.split(counts), w1, strict=True)])
            a = gated_activation(h, None, "silu")
            y = torch.cat([rows @ w for rows, w in zip(a.split(counts), w2, strict=True)])
            discarding("moe_act").consumed("moe_act", (a,), y, partial(gated_activation, probs_R=None, kind="silu"), h)
        found.append((saved.total_bytes, saved.num_storages))
        assert all(gradient.isfinite().all() for gradient in gradients(y, x, w1, w2))
    assert found == [found[0]] * 3
    assert found[0][0] == 2 * ROWS * FEATURES * 8
