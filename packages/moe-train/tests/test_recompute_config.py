"""What `memory.recompute` and `memory.offload` may say of a model, and what is refused with the reason."""

import pytest

from moe_train.config.error import ConfigError
from moe_train.config.toml import toml_value
from moe_train.models.units import decoder_units
from moe_train.testing import small_config


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
        ("tiny_deepseek_v3", ('memory.offload=["attn_norm"]', "memory.recompute=full"), "attn_norm in mtp.0, of which"),
        (
            "tiny_deepseek_v3",
            ('memory.offload=["moe_act@mtp.0"]',),
            r"(?s)a stage has at most 1 .*_keep_layers = 1 stay",
        ),
        ("tiny_moe", ('memory.offload=["moe_act"]', "memory.offload_fraction=0.4"), "of which nothing ever leaves"),
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
    assert small_config(f"memory.recompute={toml_value(options)}").memory.recompute == options


def test_units_are_those_of_the_layers():
    units = decoder_units(small_config(recipe="tiny_deepseek_v3").model)
    assert list(units) == ["layers.0", "layers.1", "layers.2", "mtp.0", "mtp.1"]
    both = {"layernorm", "core_attn", "mla_up_proj", "full", "attn_norm", "qkv_linear", "attn_proj", "mlp_norm"}
    assert units["layers.0"] == both | {"mlp"}
    assert units["mtp.1"] == both | {"moe", "moe_act", "shared_experts", "expert_fc1"}
