"""`Zero1` against the conformance kit, and what is its own."""

import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from torch import nn

from moe_memory import MemoryConfig, MoeMemoryError, OptimConfig, Zero1, build_engine
from moe_memory.testing import DataParallelConformance
from moe_parallel import AxisGroups, ParameterKind, ShardSpec


class TestZero1(DataParallelConformance):
    def build(self, config, groups, *, compute_dtype, keep_internal):
        return Zero1(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal)


class Layer(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.router = nn.Parameter(torch.randn(3, 5, dtype=torch.float32))
        self.w_EDF = nn.Parameter(torch.randn(3, 5, 4, dtype=dtype))
        self.b_EF = nn.Parameter(torch.randn(3, 4, dtype=dtype))
        self.norm = nn.Parameter(torch.randn(5, dtype=dtype))

    def forward(self):
        return sum(p.float().square().sum() for p in self.parameters())


def specs_of(model, experts=("w_EDF", "b_EF")):
    kinds = {True: ParameterKind.EXPERT, False: ParameterKind.DENSE}
    return {
        name: ShardSpec(name=name, shape=tuple(p.shape), kind=kinds[name in experts])
        for name, p in model.named_parameters()
    }


def started(dtype=torch.float32, keep_internal=("router",), **changes):
    config = OptimConfig(**{"lr": 0.1, "weight_decay": 0.5} | changes)
    engine = Zero1(config, AxisGroups(), compute_dtype=dtype, keep_internal=keep_internal)
    model = Layer(dtype)
    return engine, engine.wrap(model, specs_of(model))


def report(engine, model, *, last=True):
    engine.grads_ready([name for name, _ in model.named_parameters()], last=last)


def test_build_engine_builds_what_the_configuration_names():
    engine = build_engine(
        MemoryConfig(), OptimConfig(), AxisGroups(), compute_dtype=torch.bfloat16, keep_internal=["router"]
    )
    assert isinstance(engine, Zero1)
    model = engine.wrap(Layer(), specs_of(Layer()))
    assert model.router.dtype == torch.float32
    assert model.norm.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("memory", "optim", "dtype", "says"),
    [
        ({"bucket_mib": 0}, {"lr": -1.0}, torch.float32, "memory.bucket_mib = 0: .*; optim.lr = -1.0: "),
        ({"prefetch_units": 2}, {}, torch.float32, "memory.prefetch_units = 2: "),
        ({"data_parallel": "fsdp"}, {"offload": "step"}, torch.float32, "optim.offload = 'step': "),
        # What the engine is told, whatever the configuration says.
        ({"compute_dtype": "bfloat16"}, {"master_dtype": "bfloat16"}, torch.float32, "optim.master_dtype = 'bfloat16'"),
        ({}, {}, torch.float16, "memory.compute_dtype = 'float16': "),
    ],
)
def test_build_engine_refuses_everything_that_is_wrong(memory, optim, dtype, says):
    with pytest.raises(MoeMemoryError, match=says):
        build_engine(MemoryConfig(**memory), OptimConfig(**optim), AxisGroups(), compute_dtype=dtype)


@pytest.mark.parametrize(
    ("name", "kind", "placements", "axis", "legal"),
    [
        ("router", ParameterKind.DENSE, (), "cp", "tp"),  # summed already
        ("router", ParameterKind.DENSE, (("tp", 0),), "tp", "none"),  # parts of different elements
        ("w_EDF", ParameterKind.EXPERT, (("ep", 0),), "tp", "etp"),  # of the other view
    ],
)
def test_a_sum_over_ranks_without_copies_is_refused(name, kind, placements, axis, legal):
    model = Layer()
    shape = tuple(model.get_parameter(name).shape)
    spec = ShardSpec(name=name, shape=shape, kind=kind, placements=placements, grad_sum_axes=(axis,))
    with pytest.raises(MoeMemoryError, match=f"{name} sums its gradient over {axis}; .* {legal} here"):
        Zero1(OptimConfig(), AxisGroups(), compute_dtype=torch.float32).wrap(model, specs_of(model) | {name: spec})


def test_finish_twice_is_refused():
    """Partial gradients would be summed twice."""
    engine, model = started()
    model().backward()
    report(engine, model)
    engine.finish()
    with pytest.raises(MoeMemoryError, match=r"finish\(\) was called before"):
        engine.finish()


def test_a_sharded_parameter_is_refused_and_not_saved_as_if_it_were_whole():
    model = Layer()
    specs = specs_of(model)
    specs["w_EDF"] = ShardSpec(name="w_EDF", shape=(6, 5, 4), kind=ParameterKind.EXPERT, placements=(("ep", 0),))
    with pytest.raises(MoeMemoryError, match=r"w_EDF has shape \(3, 5, 4\) here; .* leaves \(6, 5, 4\)"):
        Zero1(OptimConfig(), AxisGroups(), compute_dtype=torch.float32).wrap(model, specs)


def test_a_frozen_parameter_is_refused_before_the_first_step():
    model = Layer()
    model.norm.requires_grad_(False)
    with pytest.raises(MoeMemoryError, match="norm requires no gradient"):
        Zero1(OptimConfig(), AxisGroups(), compute_dtype=torch.float32).wrap(model, specs_of(model))


def test_a_model_without_parameters_is_refused():
    with pytest.raises(MoeMemoryError, match="no parameters"):
        Zero1(OptimConfig(), AxisGroups(), compute_dtype=torch.float32).wrap(nn.Module(), {})


def test_r050_a_pattern_without_effect_is_refused():
    with pytest.raises(MoeMemoryError, match=r"'rooter\*' .* matches no parameter"):
        started(keep_internal=["router", "rooter*"])


def test_r064_decay_reaches_matrices_only():
    """With zero gradients the first moment stays zero, so that what moves was decayed."""
    engine, model = started(dtype=torch.float64)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (model() * 0).backward()
    report(engine, model)
    engine.finish()
    engine.step(0.1, 1.0)
    for name, parameter in model.named_parameters():
        shrunk = name in ("router", "w_EDF")
        torch.testing.assert_close(
            parameter.detach(), before[name] * (1 - 0.1 * 0.5 if shrunk else 1), rtol=0, atol=1e-15
        )
        assert torch.equal(parameter.detach(), before[name]) != shrunk


def test_r068_an_fp32_router_among_bf16_weights():
    """Two microbatches; expert 1 gets tokens only in the second. Gradients equal a run without an engine."""
    engine, model = started(torch.bfloat16)
    assert {name: p.dtype for name, p in model.named_parameters()} == {
        "router": torch.float32,
        **dict.fromkeys(("w_EDF", "b_EF", "norm"), torch.bfloat16),
    }
    twin = deepcopy(model)
    total = {name: torch.zeros(p.shape) for name, p in twin.named_parameters()}
    for number, experts in enumerate(([0, 2], [1])):
        twin.zero_grad()
        for each in (model, twin):
            loss = each.router.square().sum() + each.norm.float().square().sum()
            (loss + each.w_EDF[experts].float().square().sum() + each.b_EF[experts].float().sum()).backward()
        for name, parameter in twin.named_parameters():
            total[name] += parameter.grad
        report(engine, model, last=number == 1)
    engine.finish()
    for part in engine.gradient_tensors():
        assert torch.equal(part.tensor, total[part.name])
    assert total["w_EDF"][1].any()
    before = model.router.detach().clone()
    engine.step(0.1, 1.0)
    assert model.router.dtype == torch.float32
    assert not torch.equal(model.router, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_r094_storage_never_moves(dtype):
    """A checkpoint handle made before training holds what training left."""
    engine, model = started(dtype)
    handles = list(engine.state_tensors())
    addresses = [p.data_ptr() for p in model.parameters()]
    for _ in range(3):
        model().backward()
        report(engine, model)
        engine.finish()
        engine.step(0.1, 1.0)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    for handle, now in zip(handles, engine.state_tensors(), strict=True):
        assert handle.tensor.data_ptr() == now.tensor.data_ptr()
        assert handle.tensor.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_grad_by_the_caller_loses_nothing(dtype):
    """`model.zero_grad()` sets gradients to None; what the next backward puts there still reaches the bucket."""
    runs = []
    for clear in (False, True):
        torch.manual_seed(1)
        engine, model = started(dtype)
        for number in range(2):
            if clear:
                model.zero_grad()
            (model() * (number + 1)).backward()
            report(engine, model, last=number == 1)
        engine.finish()
        runs.append(engine.norm_parts(2.0))
    assert runs[0] == runs[1]
    assert float(runs[0]["expert"]) > 0


def test_a_gradient_is_absent_after_one_that_was_not_reported():
    """A backward that was dropped by loading a checkpoint is not mistaken for that of the next step."""
    engine, model = started()
    model().backward()
    engine.load_finished({"updates": 0})
    with pytest.raises(MoeMemoryError, match="no gradient for router, w_EDF, b_EF, norm"):
        report(engine, model)


def test_norm_of_a_long_bucket_does_not_depend_on_where_it_is_cut():
    model = nn.Module()
    model.long = nn.Parameter(torch.zeros(3_000_000))
    engine = Zero1(OptimConfig(), AxisGroups(), compute_dtype=torch.float32)
    engine.wrap(model, specs_of(model))
    gradient = torch.randn(3_000_000)
    (model.long * gradient).sum().backward()
    engine.grads_ready(["long"], last=True)
    engine.finish()
    exact = float(gradient.double().square().sum())
    assert float(engine.norm_parts(2.0)["dense"]) == pytest.approx(exact, rel=1e-8)
    assert float(engine.norm_parts(2.0)["expert"]) == 0


@pytest.mark.parametrize("values", [{}, {"updates": 1, "epoch": 2}, {"updates": 1.5}, {"updates": -1}, {"steps": 1}])
def test_another_state_is_refused(values):
    engine, _ = started()
    with pytest.raises(MoeMemoryError, match="expected"):
        engine.load_finished(values)


def test_the_compiler_is_not_imported_to_step():
    """`torch.optim.AdamW` would import it, which takes longer than importing torch."""
    code = (
        "import sys, torch\n"
        "from moe_memory import OptimConfig, Zero1\n"
        "from moe_parallel import AxisGroups, shard_specs\n"
        "model = torch.nn.Linear(4, 4)\n"
        "engine = Zero1(OptimConfig(), AxisGroups(), compute_dtype=torch.float32)\n"
        "engine.wrap(model, shard_specs(model, []))\n"
        "model(torch.ones(4)).sum().backward()\n"
        "engine.grads_ready(['weight', 'bias'], last=True)\n"
        "engine.finish()\n"
        "engine.step(0.1, 1.0)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
