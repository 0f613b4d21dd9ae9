"""What tensors a peak consists of: classes and owners of small computations, by hand."""

import gc
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_memory import LayerUnits, MemoryConfig, MoeMemoryError, OptimConfig, Replay, Zero1, build_engine, run_unit
from moe_memory.measure import (
    MEMORY_CLASSES,
    IdleInput,
    LiveBytes,
    MemoryAccount,
    Owner,
    Peak,
    account as account_module,
    timed,
    within,
)
from moe_memory.recompute import activation_policy
from moe_parallel import AxisGroups, ParallelLayout, ShardSpec, run_distributed

CPU = torch.device("cpu")


def owners(account, phase="p"):
    return {tuple(owner): size for owner, size in account.peaks[phase].owners.items()}


def test_what_outlives_its_scope_is_an_activation_and_the_rest_temporary():
    account = MemoryAccount(CPU)
    x = torch.randn(100)
    with account:
        with account.phase("inside"), account.within("unit"):
            y = x + 1
            z = y + y
            del y
        with account.phase("behind"):
            w = z * 2
            del w
    assert owners(account, "inside") == {("temporary", "unit"): 800}
    assert owners(account, "behind") == {("activations", "unit"): 400, ("temporary", "unnamed"): 400}
    assert account.peaks["behind"].total_bytes == 800
    assert account.peaks["behind"].classes() == dict.fromkeys(MEMORY_CLASSES, 0) | {
        "activations": 400,
        "temporary": 400,
    }


def test_the_innermost_scope_owns_and_hands_on_what_it_returns():
    account = MemoryAccount(CPU)
    x = torch.randn(100, requires_grad=True)

    def inner(replay, x):
        return torch.tanh(torch.tanh(x))

    def outer(replay, x):
        return LayerUnits(layer="layers.0").run("mlp", inner, x) * 2

    with account, account.phase("p"), account.within("layers.0"):
        y = run_unit(activation_policy("none"), "layers.0", outer, x)
    # Both tanh keep what they made, but the second returned it, which belongs to who called it.
    assert owners(account) == {
        ("activations", "layers.0.mlp"): 400,
        ("activations", "layers.0.rest"): 400,
        ("activations", "layers.0.output"): 400,
    }
    y.sum().backward()


def test_outputs_of_a_unit_have_its_name_and_idle_inputs_are_listed_beside():
    account, units = MemoryAccount(CPU), LayerUnits(layer="layers.0")
    x = torch.randn(100, requires_grad=True)
    with account:
        with account.phase("p"), account.within("layers.0.rest"):
            h = x * 2
            a = torch.tanh(h)
            y = torch.tanh(a)
            units.idle("moe_act", (h,), y)
            units.consumed("moe_act", (a,), y, torch.tanh, h)
            del h, a
        with account.phase("later"):
            torch.empty(1)
    assert owners(account, "later") == {
        ("activations", "layers.0.moe_act"): 400,
        ("activations", "layers.0.rest"): 400,
        ("temporary", "unnamed"): 4,
    }
    assert dict(account.peaks["p"].idle) == {IdleInput("layers.0.moe_act", 100): 400}
    assert dict(account.peaks["later"].idle) == {}  # nothing kept h: its values are not needed


@pytest.mark.parametrize("recompute", ["none", ("moe_act",)])
def test_a_discarded_output_counts_until_it_is_freed_and_from_when_it_is_filled(recompute):
    units = LayerUnits(activation_policy(recompute), "layers.0")
    x = torch.randn(10_000, requires_grad=True)
    with (account := MemoryAccount(CPU)):
        with account.phase("forward"), account.within("layers.0.rest"):
            h = x * 2
            a = torch.tanh(h)  # which keeps what it made
            y = a * 3
            units.consumed("moe_act", (a,), y, torch.tanh, h)
            del h, a
        with account.phase("between"):
            torch.empty(0)
        with account.phase("backward"), account.backward("layers.0"):
            y.sum().backward()
    between = owners(account, "between")
    assert between.get(("activations", "layers.0.moe_act"), 0) == (40_000 if recompute == "none" else 0)
    assert owners(account, "backward")["activations", "layers.0.moe_act"] == 40_000


def test_weights_gradients_and_state_of_an_engine():
    model = nn.Sequential(nn.Linear(32, 16, bias=False), nn.Linear(16, 16, bias=False))
    specs = {name: ShardSpec(name=name, shape=tuple(p.shape)) for name, p in model.named_parameters()}
    elements = 32 * 16 + 16 * 16
    with (account := MemoryAccount(CPU)):
        with account.phase("build"), within("state", "optimizer"):
            engine = Zero1(OptimConfig(), AxisGroups(), compute_dtype=torch.bfloat16)
            model = engine.wrap(model, specs)
            account.know(model)
        with account.phase("forward"), account.within("model"):
            loss = model(torch.ones(4, 32, dtype=torch.bfloat16)).float().sum()
        with account.phase("backward"), account.backward("model"):
            loss.backward()
        with account.phase("behind"):
            torch.empty(0)
    classes = account.peaks["build"].classes()
    assert classes["parameters"] == 2 * elements
    assert classes["gradients"] == 4 * elements
    assert classes["optimizer"] == 3 * 4 * elements
    # In bfloat16 autograd makes gradients of its own, which the engine adds to those in float32.
    assert account.peaks["behind"].classes()["gradients"] == (4 + 2) * elements
    assert owners(account, "build")["parameters", "in buckets"] == 2 * elements


def test_weights_of_their_own_have_the_name_of_the_parameter():
    model = nn.Sequential(nn.Linear(30, 20))
    with (account := MemoryAccount(CPU)):
        with account.phase("known"):
            account.know(model)
        with account.phase("called"):
            nn.Linear(5, 3, bias=False)(torch.ones(5))
    assert owners(account, "known") == {("parameters", "0.weight"): 2400, ("parameters", "0.bias"): 80}
    assert owners(account, "called")["parameters", "Linear.weight"] == 60


def test_classes_add_up_to_what_lives_at_every_moment():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(40, 60), nn.GELU(), nn.Linear(60, 40)) for _ in range(4)))
    specs = {name: ShardSpec(name=name, shape=tuple(p.shape)) for name, p in model.named_parameters()}
    engine = build_engine(MemoryConfig(), OptimConfig(), AxisGroups(), compute_dtype=torch.float32)
    account, live = MemoryAccount(CPU), LiveBytes()

    def layers(x):
        for number, layer in enumerate(model):
            x = run_unit(activation_policy("full"), f"layers.{number}", lambda _, x, layer=layer: layer(x), x)
        return x

    with account, live:
        engine.wrap(model, specs)
        for _ in range(2):
            live.restart_peak()
            account.restart()
            with account.phase("forward"):
                loss = layers(torch.randn(16, 40)).square().mean()
            with account.phase("backward"), account.backward("all"):
                loss.backward()
            del loss
            with account.phase("rest"):
                engine.grads_ready(list(specs), last=True)
                engine.finish()
                engine.step(1e-3, 1.0)
            assert max(peak.total_bytes for peak in account.peaks.values()) == live.peak_bytes
            for peak in account.peaks.values():
                assert sum(peak.owners.values()) == peak.total_bytes
                assert min(peak.owners.values()) > 0


def test_a_phase_that_occurs_again_has_its_largest_peak_and_restart_forgets():
    account = MemoryAccount(CPU)
    with account:
        for size in (10, 30, 20):
            with account.phase("p"):
                torch.empty(size)
        assert account.peaks == {"p": Peak(120, {Owner("temporary", "unnamed"): 120}, {})}
        kept = torch.empty(5)
        account.restart()
        with account.phase("q"):
            pass
    assert owners(account, "q") == {("temporary", "unnamed"): 20}
    del kept
    account.restart()
    with account, account.phase("r"):
        pass
    assert account.peaks == {"r": Peak()}


def test_only_scopes_of_a_forward_are_timed():
    account = MemoryAccount(CPU)
    with account:
        with account.phase("backward"), within("unit"), timed("part"):
            pass
        assert dict(account.seconds) == {}
        with account.phase("forward"), within("unit"), timed("part"):
            pass
    assert set(account.seconds) == {"unit", "part"}
    assert 0 < account.seconds["part"] < account.seconds["unit"]


def test_on_a_gpu_scopes_wait_for_the_current_stream_and_not_for_the_device(monkeypatch):
    """Of which a stream may be receiving what a neighbour sends when it has the output of this very scope."""

    def never(device):
        raise AssertionError("the whole device was waited for")

    waited, device = [], torch.device("cuda", 1)
    stream = SimpleNamespace(synchronize=lambda: waited.append("current"))
    monkeypatch.setattr(torch.cuda, "synchronize", never)
    monkeypatch.setattr(torch.cuda, "current_stream", {device: stream}.__getitem__)
    account = MemoryAccount(device)
    with account, account.phase("forward"), within("unit"):
        pass
    assert waited == ["current"] * 2
    assert set(account.seconds) == {"unit"}


def test_an_error_leaves_scopes_and_the_next_account_can_open():
    account = MemoryAccount(CPU)
    with pytest.raises(KeyError), account, account.phase("p"), within("outer"), within("inner", "dispatch"):
        raise KeyError
    with MemoryAccount(CPU) as other:
        with pytest.raises(MoeMemoryError, match="open already"), account:
            pass
        with other.phase("p"), within("again"):
            kept = torch.empty(10)
        with other.phase("q"):
            torch.empty(0)
    assert owners(other, "q") == {("activations", "again"): 40}
    del kept


def test_a_class_that_does_not_exist_is_refused_where_it_is_named():
    with MemoryAccount(CPU), pytest.raises(MoeMemoryError, match="'activation' is no class of memory; classes are"):
        within("layers.0", "activation").__enter__()


def test_without_an_account_a_scope_is_nothing():
    with within("unit"), timed("part"):
        assert torch.ones(3).sum() == 3


def test_it_keeps_nothing_alive():
    account = MemoryAccount(CPU)
    gc.disable()
    try:
        with account, account.phase("p"), within("unit"):
            x = torch.empty(100)
            del x
            torch.empty(0)
        assert account.peaks["p"].total_bytes == 400
        account.restart()
        with account, account.phase("p"):
            pass
        assert account.peaks["p"].total_bytes == 0
    finally:
        gc.enable()


def test_other_devices_do_not_count():
    with (account := MemoryAccount(CPU)), account.phase("p"):
        torch.empty(100, device="meta")
    assert account.peaks["p"].total_bytes == 0


@pytest.mark.dist
def test_weights_that_fully_shard_gathers_are_parameters_while_they_are_there():
    def on_rank(groups):
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
        for layer in model:
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
        with (account := MemoryAccount(CPU)):
            account.know(model)
            for _ in range(2):
                account.restart()
                with account.phase("forward"), account.within("model"):
                    loss = model(torch.ones(1, 64)).sum()
                with account.phase("backward"), account.backward("model"):
                    loss.backward()
                del loss
                with account.phase("behind"):
                    torch.empty(0)
        return {phase: peak.classes() for phase, peak in account.peaks.items()}

    matrix = 64 * 64 * 4
    for found in run_distributed(ParallelLayout(world=2), on_rank):
        # Half of each, and the one that is gathered.
        assert found["forward"]["parameters"] == 2.5 * matrix
        assert found["behind"]["parameters"] == 1.5 * matrix
        assert found["behind"]["gradients"] == 1.5 * matrix
        assert found["behind"]["activations"] == 0


def test_units_of_a_layer_are_timed_and_named():
    account, units = MemoryAccount(CPU), LayerUnits(layer="layers.3")
    with account, account.phase("forward"):
        with units.making("layernorm"):
            pass
        with units.within("router"):
            kept = torch.empty(10)
        units.run("core_attn", lambda replay, x: x, kept, replay=Replay())
        again = partial(torch.tanh, kept)
        units.consumed("layernorm", (kept,), again(), torch.tanh, kept)
    assert set(account.seconds) == {"layers.3.layernorm", "layers.3.router", "layers.3.core_attn"}
    assert owners(account, "forward")["activations", "layers.3.layernorm"] == 40


def test_what_was_made_in_no_scope_can_be_adopted():
    account = MemoryAccount(CPU)
    with account, account.phase("p"):
        sent = torch.empty(10)
        with within("unit"):
            made = torch.empty(20)
        account.adopt([sent, made], "inputs")
    assert owners(account) == {("activations", "inputs"): 40, ("activations", "unit"): 80}


def test_an_input_that_two_units_read_waits_for_the_first():
    account, x = MemoryAccount(CPU), torch.empty(0)
    with account, account.phase("p"):
        h = torch.empty(8)
        account.idle([h], "layers.0.core_attn")
        account.idle([h.view(2, 4)], "layers.0.attn_proj")
        account.idle([x], "layers.0.attn_norm")  # made before, and so not known
    assert account.peaks["p"].idle == {IdleInput("layers.0.core_attn", 8): 32}


def test_what_is_freed_at_the_end_of_a_scope_is_no_activation():
    account = MemoryAccount(CPU)
    with account, account.phase("p"):
        with within("unit"):
            x = torch.empty(10)
            del x
        torch.empty(1)
    assert owners(account) == {("temporary", "unit"): 40}


def test_what_an_operator_resizes_has_its_new_size():
    account, live = MemoryAccount(CPU), LiveBytes()
    with account, live, account.phase("p"), within("unit"):
        x = torch.empty(10)
        x.resize_(100)
        torch.add(torch.ones(1000), 1, out=(y := torch.empty(0)))
    assert account.peaks["p"].total_bytes == live.peak_bytes == 400 + 2 * 4000
    assert live.live_bytes == x.nbytes + y.nbytes


class _Cycle:
    def __init__(self, size):
        self.itself, self.tensor = self, torch.empty(size)


def test_garbage_may_be_collected_in_the_middle_of_anything(monkeypatch):
    """Then tensors are freed while the account sorts others: whenever it makes an object of its own."""

    def collecting(make):
        def made(*parts):
            gc.collect(0)
            return make(*parts)

        return made

    for made in (Owner, Peak, dict):
        monkeypatch.setattr(account_module, made.__name__, collecting(made), raising=False)
    account, live = MemoryAccount(CPU), LiveBytes()
    with account, live:
        for size in range(1, 10):
            with account.phase("p"):
                for scope in ("layers.0", "layers.1"):
                    with account.within(scope):
                        _Cycle(size), _Cycle(size)
                    kept = [_Cycle(size) for _ in range(3)]
                    account.claim([cycle.tensor for cycle in kept], "claimed")
                    del kept
            peak = account.peaks["p"]
            assert sum(peak.owners.values()) == peak.total_bytes == live.peak_bytes


@pytest.mark.parametrize("measure", [LiveBytes, partial(MemoryAccount, CPU)])
def test_tensors_without_a_storage_are_not_seen_and_do_no_harm(measure):
    embedding = nn.Embedding(10, 4, sparse=True)
    with (found := measure()):
        embedding(torch.tensor([1, 3])).sum().backward()
        dense = embedding.weight.grad.to_dense()
        if isinstance(found, MemoryAccount):
            found.know(embedding)
    assert dense.sum() == 8
