"""The rules of the model's options: each violation is named, and no option is without effect in silence."""

import pytest

from moe_kernels.config import RouterConfig, YarnConfig
from moe_train.config.load import load_config
from moe_train.config.toml import to_toml
from moe_train.hf.config import config_to_hf
from moe_train.hf.families import FAMILIES
from moe_train.models.config import BalanceConfig, DecoderConfig, LatentConfig

LATENT = {"attention": "latent", "num_kv_heads": 4, "qk_norm": "none"}
WRONG = {
    "latent attention has a key/value head for each head": ({**LATENT, "num_kv_heads": 2}, "model.num_kv_heads"),
    "latent attention normalises no heads": ({**LATENT, "qk_norm": "head"}, "model.qk_norm"),
    "latent attention has no biases": ({**LATENT, "qkv_bias": True}, "model.qkv_bias"),
    "rotated features are pairs": (
        {**LATENT, "latent": LatentConfig(rotary_features=5)},
        "model.latent.rotary_features",
    ),
    "latent widths are positive": ({**LATENT, "latent": LatentConfig(query_features=0)}, "model.latent.query_features"),
    "heads that rotate are even": ({"head_features": 7}, "model.head_features"),
    "heads divide": ({"num_kv_heads": 3}, "model.num_kv_heads"),
    "a layer that is not there": ({"dense_layers": (4,), "dense_features": 8}, "model.dense_layers"),
    "a layer named twice": ({"dense_layers": (1, 1), "dense_features": 8}, "model.dense_layers"),
    "no layer with experts": ({"dense_layers": (0, 1, 2, 3), "dense_features": 8}, "model.dense_layers"),
    "dense layers without a width": ({"dense_layers": (0,)}, "model.dense_features"),
    "a width without dense layers": ({"dense_features": 8}, "model.dense_features"),
    "full layers without a window": ({"full_attention_layers": (1,)}, "model.full_attention_layers"),
    "a gate without a shared expert": ({"shared_gate": True}, "model.shared_gate"),
    "a shared expert without width": ({"shared_features": 0}, "model.shared_features"),
    "an empty window": ({"sliding_window": 0}, "model.sliding_window"),
    "an empty latent width": ({"moe_latent_features": 0}, "model.moe_latent_features"),
    "fewer than no tokens ahead": ({"mtp_layers": -1}, "model.mtp_layers"),
    "a weight that is not finite": ({"mtp_weight": float("inf")}, "model.mtp_weight"),
    "a rate below zero": ({"balance": BalanceConfig(bias_rate=-1e-3)}, "model.balance.bias_rate"),
    "recentring nothing": ({"balance": BalanceConfig(bias_recentred=True)}, "model.balance.bias_recentred"),
    "a context that shrinks": ({"yarn": YarnConfig(factor=0.5)}, "model.yarn.factor"),
    "a ramp the wrong way round": ({"yarn": YarnConfig(beta_fast=1.0, beta_slow=2.0)}, "model.yarn.beta_fast"),
    "R033: more choices than open experts": (
        {"router": RouterConfig(top_k=4, groups=4, group_top_k=1)},
        "model.router.top_k",
    ),
    "R033: groups that do not divide": ({"router": RouterConfig(groups=3)}, "model.router.groups"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_violated_rule_is_named_once(what):
    options, key = WRONG[what]
    assert [problem.key for problem in DecoderConfig(**options).problems()] == [key]


def test_legal_configurations_have_no_problems():
    for options in ({}, LATENT, {"mtp_layers": 2}, {"sliding_window": 4, "full_attention_layers": (0,)}):
        assert DecoderConfig(**options).problems() == []
    assert DecoderConfig(dense_layers=(0, 2), dense_features=9, shared_features=3, shared_gate=True).problems() == []


@pytest.mark.parametrize("family", FAMILIES)
def test_tiny_recipes_are_models_of_their_family_and_survive_a_file(family, tmp_path):
    config = load_config(f"tiny_{family}").config
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load_config(str(path)).config == config
    plain = load_config(f"tiny_{family}", [], ["model.balance.aux=0.0"]).config.model
    assert config_to_hf(plain, FAMILIES[family], 257)["model_type"] == family
