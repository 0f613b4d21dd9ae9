"""Every wrong value is named, and all at once."""

from dataclasses import FrozenInstanceError, fields, replace
from math import inf, nan

import pytest
import torch

from moe_memory import MemoryConfig, MoeMemoryError, OptimConfig
from moe_memory.config import MuonConfig, OptimGroup, ReshardConfig, state_problems

WRONG = {
    "lr": [0.0, -1.0, inf, nan],
    "warmup_steps": [-1],
    "min_lr_fraction": [-0.1, 1.1, nan],
    "beta1": [-0.1, 1.0, nan],
    "beta2": [-0.1, 1.0, nan],
    "eps": [0.0, -1e-8, inf, nan],
    "weight_decay": [-0.1, inf, nan],
    "offload_fraction": [-0.1, 1.1, nan],
    "max_grad_norm": [0.0, -1.0, inf, nan],
}


def test_defaults_are_right():
    assert OptimConfig().problems() == []
    assert MemoryConfig().problems() == []


def test_every_number_has_a_rule():
    assert set(WRONG) == {field.name for field in fields(OptimConfig) if field.type in (int, float, float | None)}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_wrong_value_is_named(name, value):
    (problem,) = OptimConfig(**{name: value}).problems()
    assert problem.key == f"optim.{name}"
    assert problem.value is value
    assert "must" in problem.rule


@pytest.mark.parametrize(
    ("name", "value"),
    [("bucket_mib", 0.0), ("bucket_mib", inf), ("shard_replicas", 0), ("prefetch_units", -1)],
)
def test_a_wrong_value_of_memory_is_named(name, value):
    (problem,) = MemoryConfig(**{name: value}).problems()
    assert (problem.key, problem.value) == (f"memory.{name}", value)


@pytest.mark.parametrize(
    ("config", "values", "says"),
    [
        (MemoryConfig, {"data_parallel": "ddp"}, "memory.data_parallel = 'ddp': .*; legal here: zero1, fsdp"),
        (MemoryConfig, {"recompute": "ful"}, "memory.recompute = 'ful': .*; legal here: none, full, a list"),
        (MemoryConfig, {"offload": "attn_norm"}, "memory.offload = 'attn_norm': .*; legal here: a list"),
        (MemoryConfig, {"compute_dtype": torch.bfloat16}, "memory.compute_dtype = torch.bfloat16"),
        (ReshardConfig, {"dense": "bakward"}, "memory.reshard.dense = 'bakward'"),
        (OptimConfig, {"kind": "moun"}, "optim.kind = 'moun': .*; legal here: adamw, muon"),
        (OptimConfig, {"schedule": "linear"}, "optim.schedule = 'linear'"),
        (OptimConfig, {"master_dtype": torch.bfloat16}, "optim.master_dtype = torch.bfloat16"),
        (OptimConfig, {"exp_avg_dtype": "float16"}, "optim.exp_avg_dtype = 'float16'"),
        (OptimConfig, {"max_grad_norm": "1.0"}, "optim.max_grad_norm = '1.0': .*; legal here: a number, none"),
        # Its characters would be patterns, of which one matches every name.
        (MuonConfig, {"adamw": "*router*"}, r"optim.muon.adamw = '\*router\*'"),
        (OptimGroup, {"pattern": "*", "weight_decay": "0.1"}, "optim.groups.weight_decay = '0.1'"),
    ],
)
def test_what_is_no_word_of_an_option_is_refused_where_it_is_written(config, values, says):
    """Nothing takes it for the default, whoever reads it."""
    with pytest.raises(MoeMemoryError, match=says):
        config(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"max_grad_norm": None},
        {"warmup_steps": 0},
        {"min_lr_fraction": 0.0},
        {"min_lr_fraction": 1.0},
        {"beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0},
    ],
)
def test_legal_edges(values):
    assert OptimConfig(**values).problems() == []


def test_all_mistakes_are_reported_at_once():
    config = OptimConfig(lr=-1.0, beta1=2.0, eps=0.0)
    assert [problem.key for problem in config.problems()] == ["optim.lr", "optim.beta1", "optim.eps"]


@pytest.mark.parametrize(
    ("config", "key", "value", "switch"),
    [
        (MemoryConfig(prefetch_units=2), "memory.prefetch_units", 2, {"data_parallel": "fsdp"}),
        (
            MemoryConfig(reshard=ReshardConfig(expert="step")),
            "memory.reshard.expert",
            "step",
            {"data_parallel": "fsdp"},
        ),
        (OptimConfig(offload_fraction=0.5), "optim.offload_fraction", 0.5, {"offload": "step"}),
        (OptimConfig(offload="state", offload_fraction=0.5), "optim.offload_fraction", 0.5, {"offload": "step"}),
        (OptimConfig(muon=MuonConfig(momentum=0.9)), "optim.muon.momentum", 0.9, {"kind": "muon"}),
        (
            OptimConfig(muon=MuonConfig(steps=3)),
            "optim.muon.steps",
            3,
            {"groups": (OptimGroup(pattern="*", kind="muon"),)},
        ),
    ],
)
def test_settings_of_what_is_off_are_refused(config, key, value, switch):
    def problems(config):
        if isinstance(config, MemoryConfig):
            return state_problems(config, OptimConfig())
        return state_problems(MemoryConfig(), config)

    (problem,) = problems(config)
    assert (problem.key, problem.value) == (key, value)
    assert problems(replace(config, **switch)) == []


@pytest.mark.parametrize("config", [MemoryConfig, OptimConfig])
def test_configs_are_frozen_and_take_keywords_only(config):
    with pytest.raises(TypeError):
        config("zero1")
    with pytest.raises(FrozenInstanceError):
        setattr(config(), fields(config)[0].name, None)
    assert config.__pydantic_config__ == {"extra": "forbid"}
