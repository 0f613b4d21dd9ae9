"""Offload changes where inputs wait and nothing else; copies end when they are waited for, and not before."""

import gc
import weakref

import pytest
import torch

from moe_memory import (
    LayerUnits,
    MemoryConfig,
    MoeMemoryError,
    Offload,
    OffloadRules,
    activation_policy,
    memory_policy,
    run_unit,
)
from moe_memory.copies import FakeCopies
from moe_memory.recompute import KEEP

ROWS, FEATURES, LAYERS = 6, 5, 5


class Recorded(FakeCopies):
    """Says in which order copies of which layer begin and end."""

    def __init__(self):
        super().__init__()
        self.events = []
        self.names = {}

    def name(self, tensor, name):
        self.names[id(tensor.untyped_storage())] = name

    def _named(self, tensor):
        return self.names.get(id(tensor.untyped_storage()))

    def to_host(self, source, out=None):
        self.events.append(("out", self._named(source)))
        return super().to_host(source, out)

    def to_device(self, source, out):
        self.events.append(("in", self._named(out)))
        return super().to_device(source, out)

    def _done(self, copy):
        name = self._named(copy.source)
        self.events.append(("is out", name) if name is not None else ("is in", self._named(copy.out)))
        super()._done(copy)


def weights(layers=LAYERS):
    return [torch.randn(FEATURES, FEATURES, dtype=torch.float64, requires_grad=True) for _ in range(layers)]


def forward(policy, x, weights, recorded=None, storages=None):
    """Layers `x = tanh(x w)`, whose inputs are idle until the gradient of their output is there."""
    shared = policy.forward()
    for number, weight in enumerate(weights):
        units = LayerUnits(policy, f"layers.{number}")
        with shared:
            h = x * 2
            if recorded is not None:
                recorded.name(h, number)
                recorded.events.append(("forward", number))
            if storages is not None:
                storages.append(h.untyped_storage())
            y = torch.tanh(h @ weight)
            if recorded is not None:
                y.register_hook(lambda _, number=number: recorded.events.append(("backward", number)))
            units.idle("core_attn", (h,), y)
        x = y
    return x


def offload(copies=None, inner=KEEP, **rules):
    rules = {"entries": ("core_attn",), "min_elements": 1} | rules
    return Offload(inner, OffloadRules(**rules), copies or FakeCopies())


def gradients(policy, x, ws):
    return torch.autograd.grad(forward(policy, x, ws).square().sum(), [x, *ws])


def start():
    return torch.randn(ROWS, FEATURES, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("keep", [0, 1, 2, 9])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.2])
def test_gradients_are_those_of_a_plain_run(keep, fraction):
    x, ws = start(), weights()
    expected = gradients(KEEP, x, ws)
    policy = offload(keep=keep, fraction=fraction)
    for mine, theirs in zip(gradients(policy, x, ws), expected, strict=True):
        assert torch.equal(mine, theirs)
    chosen = [number for number in range(LAYERS) if int((number + 1) * fraction) > int(number * fraction)]
    offloaded = [number for number in chosen if number < LAYERS - keep]
    assert policy.offloaded_bytes == len(offloaded) * ROWS * FEATURES * 8
    assert policy.copies.in_flight == 0


def test_r081_a_value_that_is_read_before_its_copy_is_waited_for_is_an_error_in_the_result():
    """The stand-in spoils what is on its way: without the wait gradients are not finite."""

    class Impatient(FakeCopies):
        def to_device(self, source, out):
            pending = super().to_device(source, out)
            pending.wait = lambda: out
            return pending

    found = gradients(offload(Impatient()), start(), weights())
    assert not all(gradient.isfinite().all() for gradient in found)


def test_memory_is_freed_when_its_copy_is_made_and_not_before():
    storages = []
    policy = offload(keep=1)
    y = forward(policy, start(), weights(), storages=storages)
    full = ROWS * FEATURES * 8
    # The last layer stays, the one below is on its way, and what came before has left.
    assert [storage.nbytes() for storage in storages] == [0, 0, 0, full, full]
    assert policy.copies.in_flight == 1
    y.sum().backward()
    assert [storage.nbytes() for storage in storages] == [full] * LAYERS


def test_a_layer_is_loaded_while_the_one_above_it_is_differentiated():
    copies = Recorded()
    y = forward(offload(copies), start(), weights(4), copies)
    y.sum().backward()
    assert copies.events == [
        *[("forward", 0), ("forward", 1), ("out", 0), ("forward", 2), ("out", 1), ("is out", 0)],
        *[("forward", 3), ("out", 2), ("is out", 1)],
        *[("backward", 3), ("is out", 2), ("in", 2), ("backward", 2), ("is in", 2), ("in", 1)],
        *[("backward", 1), ("is in", 1), ("in", 0), ("backward", 0), ("is in", 0)],
    ]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_microbatches_in_flight_have_handlers_of_their_own(order):
    """Forwards of several microbatches and stages, then their backwards in any order, as pipelines have them."""
    ws, inputs = weights(), [start() for _ in range(3)]
    found = {}
    for policy in (KEEP, offload()):
        outputs = [forward(policy, x, ws) for x in inputs]
        for number in order:
            outputs[number].square().sum().backward()
        found[policy] = [tensor.grad for tensor in (*ws, *inputs)]
        for tensor in (*ws, *inputs):
            tensor.grad = None
    for mine, theirs in zip(*found.values(), strict=True):
        assert torch.equal(mine, theirs)


def test_forwards_that_take_turns_do_not_mix():
    """Layers of two microbatches one after the other, as overlapping schedules run them."""
    ws, inputs = weights(3), [start() for _ in range(2)]
    found = []
    for policy in (KEEP, offload()):
        handlers, xs = [policy.forward() for _ in inputs], list(inputs)
        for number, weight in enumerate(ws):
            for which, handler in enumerate(handlers):
                with handler:
                    h = xs[which] * 2
                    xs[which] = torch.tanh(h @ weight)
                    LayerUnits(policy, f"layers.{number}").idle("core_attn", (h,), xs[which])
        found.append(torch.autograd.grad(sum(x.square().sum() for x in xs), [*ws, *inputs]))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_host_memory_is_used_again_by_size():
    policy, ws = offload(), weights()
    for _ in range(4):
        gradients(policy, start(), ws)
    # Until the backward every layer but the last has its own.
    assert policy.pool.allocated_bytes == (LAYERS - 1) * ROWS * FEATURES * 8
    gradients(policy, torch.randn(2, FEATURES, dtype=torch.float64, requires_grad=True), ws)
    assert policy.pool.allocated_bytes == (LAYERS - 1) * (ROWS + 2) * FEATURES * 8


def test_rows_that_are_never_as_many_twice_do_not_take_ever_more_host_memory():
    """As those of experts: between 64 and 128 there are eight sizes, and each is an eighth too large at the most."""
    policy, ws = offload(), weights()
    for rows in (*range(64, 129), *range(128, 63, -1)):
        before = policy.offloaded_bytes, policy.pool.allocated_bytes
        gradients(policy, torch.randn(rows, FEATURES, dtype=torch.float64, requires_grad=True), ws)
        moved, made = policy.offloaded_bytes - before[0], policy.pool.allocated_bytes - before[1]
        assert moved == (LAYERS - 1) * rows * FEATURES * 8
        assert made == 0 or moved <= made <= moved * 9 / 8
    assert policy.pool.allocated_bytes <= 9 * (LAYERS - 1) * 128 * FEATURES * 8


def test_small_tensors_stay():
    for least, left in ((ROWS * FEATURES, LAYERS - 1), (ROWS * FEATURES + 1, 0)):
        policy = offload(min_elements=least)
        gradients(policy, start(), weights())
        assert policy.offloaded_bytes == left * ROWS * FEATURES * 8


@pytest.mark.parametrize(("entries", "left"), [(("core_attn@layers.[01]",), 1), (("attn_proj",), 0)])
def test_units_and_layers_are_chosen_by_name(entries, left):
    policy = offload(entries=entries)
    gradients(policy, start(), weights())
    assert policy.offloaded_bytes == left * ROWS * FEATURES * 8


def test_what_is_recomputed_from_an_offloaded_input_finds_it():
    """The input is there before the output is made again of it."""
    ws, x = weights(), start()
    found = []
    for policy in (KEEP, offload(inner=activation_policy(["moe_act"]), entries=("moe_act",))):
        shared, y = policy.forward(), x
        for number, weight in enumerate(ws):
            units = LayerUnits(policy, f"layers.{number}")
            with shared:
                h = y * 2
                a = h.square()
                y = torch.tanh(a @ weight)
                units.idle("moe_act", (h,), y)
                units.consumed("moe_act", (a,), y, torch.square, h)
        found.append(torch.autograd.grad(y.sum(), [x, *ws]))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


def test_the_input_of_a_layer_that_is_recomputed_leaves_and_is_back_before_its_second_pass():
    """Then nothing of a layer stays on the device."""
    ws, x, found, storages = weights(), start(), [], []
    for policy in (KEEP, offload(inner=activation_policy("full"), entries=("attn_norm",), keep=0)):

        def layer(_, x, weight, units):
            y = torch.tanh(torch.tanh(x @ weight) @ weight)
            units.idle("attn_norm", (x,), y)
            return y

        shared, y = policy.forward(), x
        for number, weight in enumerate(ws):
            name, storage = f"layers.{number}", y.untyped_storage()
            with shared:
                y = run_unit(policy, name, layer, y, weight, LayerUnits(policy, name))
            storages.append(storage)
        sizes = [storage.nbytes() for storage in storages]
        found.append(torch.autograd.grad(y.sum(), [x, *ws]))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
    # Nobody has waited for the last copy.
    assert sizes[LAYERS:] == [*[0] * (LAYERS - 1), ROWS * FEATURES * 8]
    assert policy.offloaded_bytes == LAYERS * ROWS * FEATURES * 8


def test_outside_of_a_forward_and_without_gradients_nothing_is_copied():
    policy = offload()
    with torch.no_grad():
        forward(policy, start(), weights())
    h = start() * 2
    LayerUnits(policy, "layers.0").idle("core_attn", (h,), torch.tanh(h))
    with policy.forward():  # of a layer that has another kind of name
        LayerUnits(policy, "block").idle("core_attn", (h,), torch.tanh(h))
    assert policy.offloaded_bytes == policy.pool.allocated_bytes == 0


@pytest.mark.parametrize("backward", [True, False])
def test_ten_steps_leave_nothing_behind(backward):
    policy, ws, alive = offload(), weights(), weakref.WeakSet()
    gradients(policy, start(), ws)
    gc.collect()
    gc.disable()
    try:
        for step in range(10):
            storages = []
            y = forward(policy, start(), ws, storages=storages)
            alive.update(storages)
            if backward:
                y.sum().backward()
            del y, storages
            assert len(alive) == policy.copies.in_flight == 0, f"step {step}"
        # Of a graph that is dropped without a backward too.
        assert policy.pool.allocated_bytes == (LAYERS - 1) * ROWS * FEATURES * 8
    finally:
        gc.enable()


@pytest.mark.parametrize("keep", [0, 1, 2])
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_after_an_exception_the_next_step_is_right_and_host_memory_is_used_again(fails_in, keep):
    policy, ws, x = offload(keep=keep), weights(), start()
    expected = gradients(KEEP, x, ws)
    gradients(policy, x, ws)
    allocated = policy.pool.allocated_bytes

    def fail(_):
        raise ArithmeticError

    for _ in range(3):
        y = forward(policy, x, ws[:3])
        if fails_in == "backward":
            y.register_hook(fail)
            y = forward(policy, y, ws[3:])
            with pytest.raises(ArithmeticError):
                y.square().sum().backward()
        del y
        assert policy.copies.in_flight == 0
        for mine, theirs in zip(gradients(policy, x, ws), expected, strict=True):
            assert torch.equal(mine, theirs)
    assert policy.pool.allocated_bytes == allocated


@pytest.mark.parametrize("keep", [0, 1])
def test_an_input_that_is_read_while_it_is_away_is_an_error(keep):
    policy, (w, *more) = offload(keep=keep), weights()
    shared, x = policy.forward(), start()
    with shared:
        h = x * 2
        other, y = h.square(), torch.tanh(h @ w)
        LayerUnits(policy, "layers.0").idle("core_attn", (h,), y)
    with shared:
        z = torch.tanh(y @ more[0])
        LayerUnits(policy, "layers.1").idle("core_attn", (y,), z)
    with pytest.raises(RuntimeError, match="needed for gradient computation has been modified"):
        other.sum().backward()
    # Behind the gradient that brings it back it has its value.
    (mine,) = torch.autograd.grad(z.sum() + (y + other).sum(), [x])
    h = x * 2
    y = torch.tanh(h @ w)
    (theirs,) = torch.autograd.grad(torch.tanh(y @ more[0]).sum() + (y + h.square()).sum(), [x])
    assert torch.equal(mine, theirs)


def test_an_input_of_two_modules_is_refused():
    policy = offload(entries=("core_attn", "attn_proj"))
    units, h = LayerUnits(policy, "layers.0"), start() * 2
    with policy.forward():
        y, z = h.square(), torch.tanh(h)
        units.idle("core_attn", (h,), y)
        with pytest.raises(MoeMemoryError, match=r"attn_proj.*waits for the backward of core_attn already"):
            units.idle("attn_proj", (h.view(-1),), z)


def test_inputs_without_rows_parts_of_a_storage_and_views_with_gaps_return():
    w = weights(1)[0]
    for make in (lambda x: x * 2, lambda x: (x * 2).t().contiguous().t(), lambda x: torch.cat((x, x), -1)[1:, ::2]):
        for rows in (0, ROWS):
            x, found = torch.randn(rows, FEATURES, dtype=torch.float64, requires_grad=True), []
            for policy in (KEEP, offload(keep=0)):
                shared, y = policy.forward(), x
                for number in range(2):
                    with shared:
                        h = make(y)
                        y = torch.tanh(h @ w)
                        LayerUnits(policy, f"layers.{number}").idle("core_attn", (h, h[:2]), y)
                found.append(torch.autograd.grad(y.sum(), [x, w]))
            for mine, theirs in zip(*found, strict=True):
                assert torch.equal(mine, theirs)
            assert (policy.offloaded_bytes > 0) == (rows > 0)


def test_the_configuration_makes_the_policy():
    assert memory_policy(MemoryConfig(), torch.device("cpu")) is KEEP
    config = MemoryConfig(offload=("moe_act@layers.1",), offload_fraction=0.5, offload_min_elements=7)
    policy = memory_policy(config, torch.device("cpu"))
    assert isinstance(policy, Offload)
    assert policy.rules == OffloadRules(entries=("moe_act@layers.1",), fraction=0.5, min_elements=7, keep=1)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"offload": ("attention",)}, "memory.offload"),
        ({"offload": ("moe_act", "moe_act")}, "memory.offload"),
        ({"offload_fraction": 0.0}, "memory.offload_fraction"),
        ({"offload_fraction": 1.1}, "memory.offload_fraction"),
        ({"offload_min_elements": 0}, "memory.offload_min_elements"),
        ({"offload_keep_layers": -1}, "memory.offload_keep_layers"),
    ],
)
def test_wrong_values_are_named(options, key):
    (problem,) = MemoryConfig(**options).problems()
    assert problem.key == key
