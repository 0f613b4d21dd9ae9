"""Units that are recomputed or offloaded change memory and nothing else: losses and gradients keep their bits."""

from functools import partial

import pytest
import torch

from moe_parallel import ParallelLayout, run_distributed
from moe_train import assemble as assembly
from moe_train.assemble import assemble
from moe_train.config.checks import mesh_of
from moe_train.config.error import ConfigError
from moe_train.config.load import load_config
from moe_train.config.toml import toml_value
from moe_train.data.microbatches import next_step
from moe_train.evaluate import validation_loss
from moe_train.graphs import StepGraphs
from moe_train.models.units import decoder_units
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


def train(config, groups=None, steps=2):
    """Losses, statistics, all gradients and the state after the last step."""
    run, found = assemble(config, groups), []
    for updates in range(steps):
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


@pytest.mark.parametrize("units", [("layernorm", "moe_act", "core_attn"), ("moe", "layernorm")])
def test_other_attention_and_rounded_activations_keep_their_bits_too(units):
    options = (*OPTIONS, "memory.compute_dtype=bfloat16")
    with short_corpus():
        expected = train(small_config(*options, recipe="tiny_qwen3_moe"))
        assert_equal(train(small_config(*options, listed(units), recipe="tiny_qwen3_moe")), expected)


def test_queries_without_a_latent_vector_are_kept_and_keys_and_values_made_again():
    options = (*OPTIONS, "model.latent.query_features=none")
    with short_corpus():
        expected = train(small_config(*options, recipe="tiny_deepseek_v3"))
        assert_equal(train(small_config(*options, listed(["mla_up_proj"]), recipe="tiny_deepseek_v3")), expected)


def test_a_capacity_and_forced_choices_are_those_of_the_first_pass():
    options = (*OPTIONS, "model.capacity.factor=0.6", "model.capacity.scope=microbatch")
    with short_corpus():
        expected = train(small_config(*options, recipe="tiny_deepseek_v3"))
        for units in (["moe"], ["moe_act", "layernorm"]):
            assert_equal(train(small_config(*options, listed(units), recipe="tiny_deepseek_v3")), expected)


# Ranks that share tokens, features and experts; several chunks and microbatches in flight; a backward in two passes;
# weights that are gathered.
LAYOUTS = {
    "tp cp": (("parallel.tp=2", "parallel.cp=2", "parallel.ep=2", "parallel.etp=2"), "with outputs"),
    "tp sp": (("parallel.tp=2", "parallel.sequence_parallel=true", "parallel.ep=4"), "outputs"),
    "interleaved": (("parallel.pp=2", "parallel.vpp=2", "parallel.ep=2"), "with parts"),
    "split": (("parallel.pp=2", "parallel.schedule=zero_bubble", "parallel.ep=2"), "inputs"),
    "v shape": (
        ("parallel.pp=2", "parallel.vpp=2", "parallel.schedule=zero_bubble_v", "parallel.ep=2"),
        "with outputs",
    ),
    "fsdp": (("memory.data_parallel=fsdp", "parallel.ep=2"), "layers"),
}


def over_ranks(options, choices):
    """Train plainly and with every choice in the same forked ranks."""
    settings = [*STANDARD["tiny_deepseek_v3"], *OPTIONS, "model.mtp_layers=1", "train.microbatch_sequences=1", *options]
    if "parallel.vpp=2" in options:
        settings.append("model.num_layers=4")
    configs = [load_config("tiny_deepseek_v3", [], [*settings, *more], world=4).config for more in ([], *choices)]
    parallel = configs[0].parallel
    degrees = {axis: getattr(parallel, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
    layout = ParallelLayout(world=4, **degrees)

    def on_rank(mesh):
        expected = train(configs[0], mesh, steps=1)
        for config in configs[1:]:
            assert_equal(train(config, mesh, steps=1), expected)

    with short_corpus():
        run_distributed(layout, on_rank, timeout_s=60, limit_s=200, **mesh_of(configs[0], layout))


@pytest.mark.dist
@pytest.mark.parametrize("name", LAYOUTS)
def test_r077_r088_over_four_ranks_every_rank_has_the_bits_of_a_plain_run(name):
    """Groups are those that the model was built with: ranks of tp are neighbours, those of cp and ep are not."""
    options, choice = LAYOUTS[name]
    over_ranks(options, [offloaded(*OFFLOADED[choice]) if choice in OFFLOADED else [listed(CHOICES[choice])]])


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


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("tiny_moe", ('memory.recompute=["mla_up_proj"]',), "names a unit that no such layer of this model has"),
        ("tiny_moe", ('memory.recompute=["shared_experts"]',), "names a unit that no such layer of this model has"),
        ("tiny_moe", ('memory.recompute=["mlp"]',), "names a unit that no such layer of this model has"),
        ("tiny_moe", ('memory.recompute=["moe@layers.7"]',), "names a unit that no such layer of this model has"),
        ("tiny_deepseek_v3", ('memory.recompute=["moe_act@layers.0"]',), "no such layer of this model has"),
        ("tiny_moe", ('memory.recompute=["moe", "moe_act"]',), "where moe keeps its input alone"),
        ("tiny_deepseek_v3", ('memory.recompute=["moe@mtp.*", "shared_experts"]',), "in mtp.0, where moe keeps"),
        ("tiny_moe", ('memory.recompute=["full", "layernorm"]',), "where full keeps its input alone"),
        ("tiny_moe", ('memory.recompute=["attention"]',), "names a unit, or unit@pattern"),
        ("tiny_moe", ('memory.recompute=["moe@"]',), "names a unit, or unit@pattern"),
        ("tiny_moe", ('memory.recompute=["moe", "moe"]',), "occurs twice"),
        ("tiny_moe", ("memory.recompute=some",), "none"),
        ("tiny_deepseek_v3", ('memory.offload=["expert_fc1@layers.0"]',), "no such layer of this model has"),
        ("tiny_moe", ('memory.offload=["moe_act"]', "memory.recompute=full"), "moe_act in layers.0, of which nothing"),
        ("tiny_moe", ('memory.offload=["moe_act"]', 'memory.recompute=["moe"]'), "of which nothing is kept"),
        ("tiny_moe", ('memory.offload=["qkv_linear"]', 'memory.recompute=["layernorm"]'), "of which nothing is kept"),
        ("tiny_deepseek_v3", ('memory.offload=["core_attn"]', 'memory.recompute=["mla_up_proj"]'), "nothing is kept"),
        ("tiny_moe", ("kernels.graphs=partial", 'memory.offload=["mlp_norm"]'), r"which offload frees \(mlp_norm\)"),
        ("tiny_moe", ("kernels.graphs=partial", 'memory.recompute=["layernorm"]'), r"run its forward again \(layer"),
        ("tiny_moe", ("kernels.graphs=partial", 'memory.recompute=["moe"]'), r"run its forward again \(moe\)"),
    ],
)
def test_what_cannot_pay_or_work_is_refused_with_the_reason(recipe, options, message):
    with pytest.raises(ConfigError, match=message):
        small_config(*options, recipe=recipe)


@pytest.mark.parametrize("options", [("moe@layers.0", "moe_act@layers.1"), ("full@layers.0", "layernorm@layers.1")])
def test_layers_may_differ(options):
    assert small_config(listed(options)).memory.recompute == options


def test_units_are_those_of_the_layers():
    units = decoder_units(small_config(recipe="tiny_deepseek_v3").model)
    assert list(units) == ["layers.0", "layers.1", "layers.2", "mtp.0", "mtp.1"]
    both = {"layernorm", "core_attn", "mla_up_proj", "full", "attn_norm", "qkv_linear", "attn_proj", "mlp_norm"}
    assert units["layers.0"] == both | {"mlp"}
    assert units["mtp.1"] == both | {"moe", "moe_act", "shared_experts", "expert_fc1"}
