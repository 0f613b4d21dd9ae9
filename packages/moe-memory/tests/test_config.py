"""Every wrong value is named, and all at once."""

from dataclasses import FrozenInstanceError, fields
from math import inf, nan

import pytest

from moe_memory import MemoryConfig, OptimConfig
from moe_memory.config import ReshardConfig, state_problems

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


@pytest.mark.parametrize("setting", [{"prefetch_units": 2}, {"reshard": ReshardConfig(expert="step")}])
def test_what_cuts_and_gathers_weights_is_for_the_engine_that_does(setting):
    (problem,) = state_problems(MemoryConfig(**setting), OptimConfig())
    ((name, value),) = setting.items()
    assert (problem.key, problem.value) == (f"memory.{name}", value)
    assert state_problems(MemoryConfig(**setting, data_parallel="fsdp"), OptimConfig()) == []


@pytest.mark.parametrize("offload", ["none", "state"])
def test_a_share_of_the_host_is_for_updates_there(offload):
    (problem,) = state_problems(MemoryConfig(), OptimConfig(offload=offload, offload_fraction=0.5))
    assert (problem.key, problem.value) == ("optim.offload_fraction", 0.5)
    assert state_problems(MemoryConfig(), OptimConfig(offload="step", offload_fraction=0.5)) == []


@pytest.mark.parametrize("config", [MemoryConfig, OptimConfig])
def test_configs_are_frozen_and_take_keywords_only(config):
    with pytest.raises(TypeError):
        config("zero1")
    with pytest.raises(FrozenInstanceError):
        setattr(config(), fields(config)[0].name, None)
    assert config.__pydantic_config__ == {"extra": "forbid"}
