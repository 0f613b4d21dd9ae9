"""`Fsdp` against the kits, and which modules it makes units of."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from moe_memory import Fsdp, MemoryConfig, MoeMemoryError, OptimConfig, Zero1, activation_policy, build_engine, run_unit
from moe_memory.data_parallel.fsdp import _Unit
from moe_memory.data_parallel.units import find_units
from moe_memory.testing import DataParallelConformance, RanksConformance
from moe_memory.testing.model import SmallMoE
from moe_memory.testing.reference import CONFIG, KEEP_INTERNAL, step_tokens
from moe_memory.testing.session import Session
from moe_parallel import AxisGroups, ParallelLayout, ParameterKind, run_distributed


@pytest.mark.dist
class TestFsdpOverRanks(RanksConformance):
    def build(self, config, groups, *, compute_dtype, keep_internal):
        return Fsdp(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal)

    def build_other(self, config, groups, *, compute_dtype, keep_internal):
        return Zero1(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal)


class TestFsdpAtOneRank(DataParallelConformance):
    """Nothing is replicated, so there is nothing to shard."""

    def build(self, config, groups, *, compute_dtype, keep_internal):
        return Fsdp(config, groups, compute_dtype=compute_dtype, keep_internal=keep_internal)


def units_of(model, experts=(), without=()):
    kinds = {
        name: ParameterKind.EXPERT if name.startswith(tuple(experts)) else ParameterKind.DENSE
        for name, parameter in model.named_parameters()
        if name not in without and parameter.ndim > 0 and parameter.numel() > 0
    }
    return [(unit.names, unit.kind.value, unit.stays) for unit in find_units(model, kinds)]


def test_units_of_a_model_with_layers():
    model = SmallMoE(torch.float32, 1)
    layers = [
        unit
        for number in range(2)
        for unit in (
            (tuple(f"layers.{number}.experts.{n}" for n in ("w1_EDF", "b1_EF", "gain_E", "w2_EDF")), "expert", False),
            ((f"layers.{number}.norm_D", f"layers.{number}.router.weight_ED"), "dense", False),
        )
    ]
    assert units_of(model, [f"layers.{number}.experts" for number in range(2)]) == [
        (("embedding.weight_VD",), "dense", True),
        *layers,
        (("head.weight_FD",), "dense", True),
        (("columns.up_DF", "columns.out_VD"), "dense", True),
        (("gate.weight_VD",), "dense", True),
    ]


def test_a_model_of_one_module_is_one_unit_of_its_matrices():
    assert units_of(nn.Linear(3, 4)) == [(("weight",), "dense", True)]


def test_parameters_beside_units_or_experts_beside_dense_ones_stay_out():
    model = nn.Module()
    model.own = nn.Parameter(torch.ones(2, 2))
    model.inner = nn.Linear(2, 2)
    layer = nn.Identity()
    layer.expert, layer.dense = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    model.layers = nn.ModuleList([layer])
    assert units_of(model, ["layers.0.expert"]) == [
        (("inner.weight",), "dense", True),
        (("layers.0.dense",), "dense", False),
    ]


def test_containers_that_are_never_called_are_no_units():
    model = SmallMoE(torch.float32, 1)
    model.extra = nn.ParameterList([nn.Parameter(torch.ones(3, 3))])
    layer = model.layers[0]
    layer.experts = nn.ParameterDict({"w1_EDF": layer.experts.w1_EDF})
    names = {name for names, *_ in units_of(model, ["layers.0.experts"]) for name in names}
    assert not names & {"extra.0", "layers.0.experts.w1_EDF"}
    assert "layers.0.norm_D" in names


def test_layers_of_experts_alone_are_units():
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 3), nn.Linear(3, 2)])
    assert units_of(model, ["layers"]) == [
        (("layers.0.weight", "layers.0.bias"), "expert", False),
        (("layers.1.weight", "layers.1.bias"), "expert", False),
    ]


@pytest.mark.dist
def test_a_rank_holds_its_shards_only_between_steps():
    def work(groups):
        engine = Fsdp(CONFIG, groups, compute_dtype=torch.bfloat16, keep_internal=KEEP_INTERNAL)
        session = Session(engine, groups, torch.bfloat16, seed=1)
        held = []
        for number in range(2):
            parameters = dict(session.model.named_parameters())
            held.append({name: p.to_local().numel() for name, p in parameters.items() if isinstance(p, DTensor)})
            loss = session.model(step_tokens(number, 1)[0])
            # In the compute dtype where another module may read it, cut again where not.
            assert session.model.embedding.weight_VD.dtype == torch.bfloat16
            assert isinstance(session.model.layers[1].norm_D, DTensor)
            loss.backward()
            session.report(last=True)
            engine.finish()
            engine.step(0.02, 1.0)
        return held

    for held in run_distributed(ParallelLayout(world=4, ep=2), work):
        assert held[0] == held[1]
        # 9 rows over 4 ranks, 2 experts over 2; the router computes in float32 and lies in a bucket.
        assert held[0]["embedding.weight_VD"] in (3 * 5, 0)
        assert held[0]["layers.0.experts.w1_EDF"] == 5 * 7
        assert not any("router" in name or "scale" in name for name in held[0])


@pytest.mark.dist
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_recompute_of_a_unit_gives_the_same_gradients(dtype):
    """The second forward of a layer runs in the backward, with weights that have been gathered once more."""

    def work(groups):
        found = []
        for name in ("none", "full"):
            engine = Fsdp(CONFIG, groups, compute_dtype=dtype, keep_internal=KEEP_INTERNAL)
            session = Session(engine, groups, dtype, seed=1)
            policy = activation_policy(name)

            def run(layer, *inputs, policy=policy):
                return run_unit(policy, "layer", lambda _, *inputs: layer(*inputs), *inputs)

            for number, token_N in enumerate(step_tokens(0, 2)):
                session.model(token_N, run=run).backward()
                session.report(last=number == 1)
            engine.finish()
            found.append({part.name: part.tensor.clone() for part in engine.gradient_tensors()})
        for name, gradient in found[0].items():
            assert torch.equal(gradient, found[1][name]), name
        return max(float(gradient.abs().max()) for gradient in found[0].values() if gradient.numel())

    assert min(run_distributed(ParallelLayout(world=2, ep=1), work)) > 0


@pytest.mark.dist
def test_weights_that_left_the_engine_are_refused():
    """As in the kit, of shards; torch itself refuses those of another dtype."""

    def work(mesh):
        engine = Fsdp(OptimConfig(), mesh, compute_dtype=torch.float32)
        session = Session(engine, mesh, torch.float32, seed=3)
        session.train(range(1))
        unit = next(store for store in engine._stores if isinstance(store, _Unit))
        unit.plan.module._apply(torch.clone)  # what `to` does, from one device to another
        session.model(step_tokens(1)[0]).backward()
        with pytest.raises(MoeMemoryError, match="have been moved or cast since wrap"):
            engine.grads_ready(unit.names, last=True)
        return True

    assert run_distributed(ParallelLayout(world=2, ep=1), work) == [True, True]


def test_the_engine_is_imported_where_it_is_chosen_only():
    assert isinstance(
        build_engine(MemoryConfig(data_parallel="fsdp"), OptimConfig(), AxisGroups(), compute_dtype=torch.float32),
        Fsdp,
    )
    code = (
        "import sys, torch\n"
        "from moe_memory import MemoryConfig, OptimConfig, build_engine\n"
        "from moe_parallel import AxisGroups\n"
        "build_engine(MemoryConfig(), OptimConfig(), AxisGroups(), compute_dtype=torch.float32)\n"
        "assert not {'torch.distributed.fsdp', 'torch.distributed.tensor', 'torch._dynamo'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
