"""Units that are recomputed or offloaded change memory and nothing else: losses and gradients keep their bits."""

import gc
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from unittest.mock import patch

import pytest
import torch

from moe_comm.local import LocalDispatcher
from moe_kernels.experts import GroupedExperts
from moe_parallel import ParallelLayout, run_distributed
from moe_train import assemble as assembly
from moe_train.assemble import assemble
from moe_train.config.checks import mesh_of
from moe_train.config.load import load_config
from moe_train.config.toml import toml_value
from moe_train.data.microbatches import next_step
from moe_train.evaluate import validation_loss
from moe_train.generate import generate_text
from moe_train.graphs import StepGraphs
from moe_train.step import run_step
from moe_train.testing import ALL_LOSSES, STANDARD, short_corpus, small_config

# Between them every unit stands with every other that it may stand with, in layers of both kinds.
CHOICES = {
    "outputs": ("layernorm", "mla_up_proj", "moe_act"),
    "parts": ("core_attn", "mlp", "shared_experts", "moe_act"),
    "layers": ("moe", "mlp", "core_attn", "layernorm", "mla_up_proj"),
    "patterns": ("full@layers.1", "moe_act@layers.[02]", "layernorm@mtp.*", "shared_experts@mtp.0", "mlp@layers.0"),
    "whole": ("full",),
}
# Inputs that wait in host memory, alone and with units that are recomputed.
OFFLOADED = {
    "inputs": ((), ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")),
    "with outputs": (CHOICES["outputs"], ("attn_norm", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")),
    "with parts": (CHOICES["parts"], ("qkv_linear@layers.*", "core_attn", "moe_act@mtp.*")),
    "with whole layers": (("full@layers.*", "layernorm@mtp.*"), ("attn_norm@layers.*",)),
    "with layers": (
        ("moe@layers.*", "mlp", "full@mtp.0"),
        ("mlp_norm@layers.*", "attn_norm@*.[12]", "core_attn@layers.*"),
    ),
}
# Two microbatches a step; routers draw.
OPTIONS = (*ALL_LOSSES, "train.microbatch_sequences=4", "model.router.jitter=0.2", "model.balance.bias_rate=0.01")


def listed(units):
    return f"memory.recompute={toml_value(units)}"


def offloaded(units, inputs):
    return listed(units), f"memory.offload={toml_value(inputs)}", "memory.offload_min_elements=1"


def train(config, groups=None, steps=2, before=lambda run: None):
    """Losses, statistics, all gradients and the state after the last step."""
    run, found = assemble(config, groups), []
    for updates in range(steps):
        before(run)
        gradients = {}

        def look(gradients=gradients):
            gradients.update({part.name: part.tensor.clone() for part in run.engine.gradient_tensors()})

        result = run_step(
            run, next_step(run.data.train, run.cut).microbatches, updates=updates, window=None, inspect=look
        )
        values = {name: value.clone() for name, value in vars(result.statistics).items()}
        found.append((result.loss, result.losses, result.gradient_norm, values, gradients))
    return found, {part.name: part.tensor.clone() for part in run.engine.state_tensors()}


def assert_equal(found, expected):
    for (loss, losses, norm, values, gradients), (*others, counted, wanted) in zip(found[0], expected[0], strict=True):
        assert [loss, losses, norm] == others
        for mine, theirs in ((values, counted), (gradients, wanted)):
            assert mine.keys() == theirs.keys()
            for name, value in theirs.items():
                assert torch.equal(mine[name], value), name
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


@pytest.fixture(scope="module")
def plain():
    with short_corpus():
        return train(small_config(*OPTIONS, recipe="tiny_deepseek_v3"))


@pytest.mark.parametrize("name", CHOICES)
def test_r010_r021_r055_r078_losses_statistics_and_gradients_are_those_of_a_plain_run(name, plain):
    """With accumulation, jitter, all losses, an expert bias, and two tokens ahead."""
    with short_corpus():
        assert_equal(train(small_config(*OPTIONS, listed(CHOICES[name]), recipe="tiny_deepseek_v3")), plain)


@pytest.mark.parametrize("name", OFFLOADED)
@pytest.mark.parametrize("more", [(), ("memory.offload_keep_layers=0", "memory.offload_fraction=0.6")])
def test_r081_offloaded_inputs_change_no_bit(name, more, plain):
    """Copies are made when they are waited for, and until then the target is spoiled (`FakeCopies`)."""
    with short_corpus():
        config = small_config(*OPTIONS, *offloaded(*OFFLOADED[name]), *more, recipe="tiny_deepseek_v3")
        assert_equal(train(config), plain)


@pytest.mark.parametrize("state", ["state", "step"])
@pytest.mark.parametrize("name", ["inputs", "with whole layers"])
def test_r081_activations_and_optimizer_state_may_both_wait_on_the_host(name, state, plain):
    with short_corpus():
        options = (*OPTIONS, *offloaded(*OFFLOADED[name]), f"optim.offload={state}")
        assert_equal(train(small_config(*options, recipe="tiny_deepseek_v3")), plain)


@pytest.mark.parametrize(
    ("units", "inputs"),
    [
        (("layernorm", "moe_act", "core_attn"), ("core_attn", "moe_act", "attn_norm")),
        (("moe", "layernorm"), ()),
        OFFLOADED["inputs"],
    ],
)
def test_other_attention_and_rounded_activations_keep_their_bits_too(units, inputs):
    options = (*OPTIONS, "memory.compute_dtype=bfloat16")
    with short_corpus():
        expected = train(small_config(*options, recipe="tiny_qwen3_moe"))
        assert_equal(train(small_config(*options, *offloaded(units, inputs), recipe="tiny_qwen3_moe")), expected)


# What else a layer may be made of, and routers that draw or solve for their choices.
NO_BALANCE = (*(f"model.balance.{name}=0" for name in ("aux", "seq", "glob")), "model.balance.bias_rate=none")
NO_GROUPS = ("model.router.groups=1", "model.router.group_top_k=1")
MODELS = {
    "queries without a latent vector": ("model.latent.query_features=none",),
    "gate": ("model.shared_gate=true",),
    "width of experts": ("model.moe_latent_features=10",),
    "both": ("model.moe_latent_features=10", "model.shared_gate=true", "model.capacity.factor=0.7"),
    "no shared expert": ("model.shared_features=none",),
    "capacity": ("model.capacity.factor=0.6", "model.capacity.scope=microbatch"),
    "fixed rows": ("comm.rank_capacity_factor=0.6", "comm.overflow=drop"),
    "forced balance": ("model.router.force_balance=true",),
    "transport plan": (*NO_BALANCE, *NO_GROUPS, "model.router.sinkhorn_iterations=3"),
    "rows apart": ("data.separate_documents=false", "train.loss_norm=microbatch"),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_layer_is_made_of_and_how_it_routes_changes_nothing(name):
    options, (outputs, inputs) = (*OPTIONS, *MODELS[name]), OFFLOADED["with outputs"]
    shared = () if name == "no shared expert" else ("shared_experts@mtp.*",)
    whole = ("moe@layers.1", "core_attn", *shared)
    with short_corpus():
        expected = train(small_config(*options, recipe="tiny_deepseek_v3"))
        for choice in (offloaded(outputs, inputs), [listed(whole)]):
            assert_equal(train(small_config(*options, *choice, recipe="tiny_deepseek_v3")), expected)


# Ranks that share tokens, features and experts; several chunks and microbatches in flight; a backward in two passes;
# weights that are gathered.
LAYOUTS = {
    "tp cp": (("parallel.tp=2", "parallel.cp=2", "parallel.ep=2", "parallel.etp=2"), "with outputs"),
    "tp sp": (("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.ep=4"), "outputs"),
    "interleaved": (("parallel.pp=2", "parallel.vpp=2", "parallel.ep=2"), "with parts"),
    "split": (("parallel.pp=2", "parallel.schedule=zero_bubble", "parallel.ep=2"), "inputs"),
    "interleaved split": (
        ("parallel.pp=2", "parallel.vpp=2", "parallel.schedule=interleaved_zero_bubble", "parallel.ep=2"),
        "with whole layers",
    ),
    "v shape": (
        ("parallel.pp=2", "parallel.vpp=2", "parallel.schedule=zero_bubble_v", "parallel.ep=2"),
        "with outputs",
    ),
    "fsdp": (("memory.data_parallel=fsdp", "parallel.ep=2"), "layers"),
    "fsdp pipeline": (
        ("memory.data_parallel=fsdp", "memory.reshard.dense=step", "parallel.pp=2", "parallel.vpp=2"),
        "with parts",
    ),
    "dynamic cp": (
        (
            *("parallel.dynamic_cp_tokens=48", "data.sequences=sentences", "data.sequence_length=64"),
            *("model.balance.aux=0", "parallel.ep=4"),
        ),
        "with outputs",
    ),
}


def over_ranks(options, choices, look=nullcontext):
    """Train plainly and with every choice in the same forked ranks; stages have a single layer, which leaves."""
    settings = [*STANDARD["tiny_deepseek_v3"], *OPTIONS, "model.mtp_layers=1", "train.microbatch_sequences=1", *options]
    settings.append("memory.offload_keep_layers=0")
    if "parallel.vpp=2" in options:
        settings.append("model.num_layers=4")
    configs = [load_config("tiny_deepseek_v3", [], [*settings, *more], world=4).config for more in ([], *choices)]
    parallel = configs[0].parallel
    degrees = {axis: getattr(parallel, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
    layout = ParallelLayout(world=4, **degrees)

    def on_rank(mesh):
        with look() as seen:
            expected = train(configs[0], mesh, steps=1)
        for config in configs[1:]:
            assert_equal(train(config, mesh, steps=1), expected)
        return seen

    with short_corpus():
        return run_distributed(layout, on_rank, timeout_s=60, limit_s=200, **mesh_of(configs[0], layout))


@pytest.mark.dist
@pytest.mark.parametrize("name", LAYOUTS)
def test_r077_r088_over_four_ranks_every_rank_has_the_bits_of_a_plain_run(name):
    """Groups are those that the model was built with: ranks of tp are neighbours, those of cp and ep are not."""
    options, choice = LAYOUTS[name]
    units = offloaded(*OFFLOADED[choice]) if choice in OFFLOADED else (listed(CHOICES[choice]),)
    over_ranks(options, [units, (*units, "optim.offload=state")])


# Every way in which rows reach the experts of four ranks, and return; the default of a layout is one of them.
EXPERTS_APART = ("parallel.ep=4", "model.num_layers=2", "parallel.ranks_per_node=2")
DISPATCHERS = {
    "choices": ("comm.kind=alltoall", "comm.row=per_expert"),
    "all": ("comm.kind=allgather",),
    "lanes": ("comm.kind=hybrid", "comm.lanes=2"),
    "rail": ("comm.kind=hybrid", "comm.rail=allgather"),
    "fixed": ("comm.kind=alltoall", "comm.rank_capacity_factor=0.6", "comm.overflow=drop"),
    "fixed lanes": ("comm.kind=hybrid", "comm.lanes=2", "comm.rank_capacity_factor=0.6", "comm.overflow=drop"),
}
DISPATCHED = [[listed(("moe", "mlp"))], offloaded(("moe_act", "layernorm"), ("expert_fc1", "moe_act", "mlp_norm"))]


@pytest.mark.dist
@pytest.mark.parametrize("name", DISPATCHERS)
def test_r077_a_plan_is_used_again_whatever_the_dispatcher(name):
    over_ranks((*EXPERTS_APART, *DISPATCHERS[name]), DISPATCHED)


@contextmanager
def rows_of_experts():
    """The numbers of rows that experts got."""
    forward, found = GroupedExperts.forward, []

    def counted(experts, rows_RD, *arguments):
        found.append(len(rows_RD))
        return forward(experts, rows_RD, *arguments)

    with patch.object(GroupedExperts, "forward", counted):
        yield found


@pytest.mark.dist
def test_r079_ranks_whose_experts_get_no_token_do_as_the_others_do():
    """One token of one choice on each rank, and eight experts."""
    few = ("data.sequence_length=1", "train.global_batch_sequences=4")
    few = (*few, *NO_GROUPS, "model.router.top_k=1", "model.router.normalize=false")
    whole = [listed(("full",))]
    found = over_ranks((*EXPERTS_APART, "comm.kind=alltoall", *few), [*DISPATCHED, whole], rows_of_experts)
    assert any(min(rows) == 0 < max(rows) for rows in found)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_choice_in_every_layout(name):
    single = {unit for units in CHOICES.values() for unit in units if "@" not in unit}
    recomputed = [[listed(units)] for units in (*CHOICES.values(), *((unit,) for unit in sorted(single)))]
    over_ranks(LAYOUTS[name][0], [*recomputed, *(offloaded(*pair) for pair in OFFLOADED.values())])


def test_evaluation_pays_nothing():
    """No unit runs twice, nothing is freed, and the value is the same."""
    with short_corpus():
        plain = assemble(small_config(*OPTIONS, recipe="tiny_deepseek_v3"))
        run = assemble(small_config(*OPTIONS, listed(CHOICES["outputs"]), recipe="tiny_deepseek_v3"))
    layer = run.model.layers[1]
    calls = []
    layer.moe_norm.register_forward_hook(lambda *_: calls.append(1))
    assert validation_loss(run, 4) == validation_loss(plain, 4)
    assert len(calls) == 1


@pytest.mark.parametrize("units", ["full", "moe"])
def test_r077_a_plan_is_made_once_and_used_twice(units):
    """Of four layers with experts and two microbatches."""
    with short_corpus():
        run = assemble(small_config(*OPTIONS, listed((units,)), recipe="tiny_deepseek_v3"))
    microbatches = next_step(run.data.train, run.cut).microbatches
    with (
        patch.object(LocalDispatcher, "plan", autospec=True, side_effect=LocalDispatcher.plan) as planned,
        rows_of_experts() as rows,
    ):
        run_step(run, microbatches, updates=0, window=None)
    assert (planned.call_count, len(rows)) == (4 * 2, 2 * 4 * 2)


def evaluated(run):
    validation_loss(run, 4)
    generate_text(run, "Once", 3, temperature=1.0, seed=0)


def skipped(run):
    """Gradients of a step are not finite."""

    def spoil():
        for part in run.engine.gradient_tensors():
            part.tensor.fill_(torch.inf)

    microbatches = next_step(run.data.train, run.cut).microbatches
    assert run_step(run, microbatches, updates=0, window=None, inspect=spoil).skipped


def failing(in_backward):
    """A step that an exception ends in the middle of a layer."""

    def fail(*_):
        raise ArithmeticError

    def after(module, arguments, output):
        return output.register_hook(fail) and None if in_backward else fail()

    def before(run):
        handle = run.model.layers[1].moe.experts.register_forward_hook(after)
        with suppress(ArithmeticError):
            run_step(run, next_step(run.data.train, run.cut).microbatches, updates=0, window=None)
        handle.remove()
        # Frames that an exception went through hold each other.
        gc.collect()

    return before


@pytest.mark.parametrize(
    "before", [evaluated, skipped, failing(False), failing(True)], ids=["evaluated", "skipped", "forward", "backward"]
)
def test_what_happens_between_steps_changes_nothing(before):
    """Host memory is used again, whether a backward brought its tensors back or was never reached."""
    seen = []

    def watched(run):
        before(run)
        seen.append((run.model.activations, run.model.activations.pool.allocated_bytes))

    with short_corpus():
        expected = train(small_config(*OPTIONS, recipe="tiny_deepseek_v3"), steps=4, before=before)
        for choice in ("with outputs", "with layers"):
            options = (*OPTIONS, *offloaded(*OFFLOADED[choice]), "memory.offload_keep_layers=0")
            seen.clear()
            assert_equal(train(small_config(*options, recipe="tiny_deepseek_v3"), steps=4, before=watched), expected)
            policy, allocated = seen[-1]
            # Of a backward that failed torch holds a part until the next one.
            assert policy.copies.in_flight == 0
            assert allocated == seen[-2][1] > 0


@pytest.mark.parametrize(
    ("scopes", "units", "inputs"),
    [
        ('["attn", "moe_router"]', ("moe_act", "shared_experts", "mlp"), ("expert_fc1", "moe_act")),
        ('["attn"]', ("moe", "mlp"), ()),
        ('["moe_router"]', ("layernorm", "mla_up_proj", "core_attn", "moe_act"), ("moe_act",)),
    ],
)
def test_units_outside_of_graphs_are_recomputed_and_offloaded(scopes, units, inputs, monkeypatch):
    monkeypatch.setattr(assembly, "StepGraphs", partial(StepGraphs, poison=True))
    graphed = ("kernels.graphs=partial", f"kernels.graph_scopes={scopes}", "data.separate_documents=false")
    with short_corpus():
        base = small_config(*OPTIONS, "data.separate_documents=false", recipe="tiny_deepseek_v3")
        config = small_config(*OPTIONS, *graphed, *offloaded(units, inputs), recipe="tiny_deepseek_v3")
        assert_equal(train(config), train(base))
