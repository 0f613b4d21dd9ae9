"""Optimizer state, groups and Muon, from the configuration to a checkpoint and across layouts."""

import os
from contextlib import redirect_stdout

import pytest
import torch

from moe_memory import MoeMemoryError
from moe_memory.config import OptimGroup
from moe_memory.testing.session import assembled, copied
from moe_parallel import AxisGroups, ParallelConfig, ParallelLayout, run_distributed
from moe_train import loop
from moe_train.assemble import assemble, load_data
from moe_train.config.checks import mesh_of
from moe_train.config.error import ConfigError
from moe_train.config.load import load_config
from moe_train.config.toml import to_toml
from moe_train.progress import restore
from moe_train.run_directory import RunDirectory
from moe_train.testing import SMALL, short_corpus, small_config
from moe_train.verify import Case, verify

GROUP = 'optim.groups=[{pattern="*.experts.*", lr_scale=0.5}, {pattern="*.q_proj.weight", kind="muon", rows=[16]}]'


def test_groups_are_tables_in_files_and_on_the_command_line(tmp_path):
    groups = (
        OptimGroup(pattern="*.experts.*", lr_scale=0.5),
        OptimGroup(pattern="*.q_proj.weight", kind="muon", rows=(16,)),
    )
    config = load_config("tiny_moe", [], [GROUP]).config
    assert config.optim.groups == groups
    path = tmp_path / "all.toml"
    path.write_text(to_toml(config))
    assert load_config(str(path)).config == config


@pytest.mark.parametrize(
    ("override", "mentions"),
    [
        ('optim.groups=[{pattern="*", lr_scal=0.5}]', "optim.groups"),
        ("optim.groups=[{lr_scale=0.5}]", "a list, each a table of pattern, lr_scale"),
        ('optim.groups=[{pattern="*", lr_scale=-1.0}]', "lr_scale of '*' must be finite"),
        ("optim.master_dtype=bfloat16", "fewer bits than the weights"),
        ("optim.muon.steps=0", "optim.muon.steps"),
        ("optim.muon.steps=3", "is for Muon, which updates nothing here; legal here: the default, or optim.kind"),
    ],
)
def test_what_is_wrong_is_named(override, mentions):
    with pytest.raises(ConfigError) as error:
        load_config("tiny_moe", [], [override])
    assert mentions in str(error.value)


@pytest.mark.parametrize(
    ("override", "mentions"),
    [
        ('optim.groups=[{pattern="*.expert.*"}]', r"'\*\.expert\.\*' in optim\.groups matches no parameter"),
        ('optim.muon.adamw=["*embedding*", "*lm_head*"]', r"'\*lm_head\*' in optim\.muon\.adamw matches no parameter"),
        (
            'optim.groups=[{pattern="*.moe.*"}, {pattern="*.experts.*", lr_scale=0.5}]',
            r"'\*\.experts\.\*' in optim\.groups reaches no parameter: .* '\*\.moe\.\*' before it take all",
        ),
    ],
)
def test_r050_a_pattern_that_reaches_nothing_is_an_error(override, mentions):
    config = load_config("tiny_moe", [], ["optim.kind=muon", override]).config
    with pytest.raises(MoeMemoryError, match=mentions):
        assemble(config)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("overrides", "dtypes"),
    [
        (("optim.exp_avg_dtype=int8", "optim.exp_avg_sq_dtype=int8"), {torch.float32, torch.uint8}),
        (
            (
                "memory.compute_dtype=bfloat16",
                "optim.master_dtype=bfloat16",
                "optim.gradient_dtype=bfloat16",
                "optim.exp_avg_sq_dtype=bfloat16",
                "optim.kind=muon",
            ),
            {torch.float32, torch.bfloat16},
        ),
        (
            (
                "optim.kind=muon",
                "optim.exp_avg_dtype=int8",
                "optim.exp_avg_sq_dtype=bfloat16",
                'optim.groups=[{pattern="*.q_proj.weight", rows=[8]}]',
            ),
            {torch.float32, torch.bfloat16, torch.uint8},
        ),
    ],
    ids=["int8", "low", "muon int8"],
)
def test_r075_a_checkpoint_keeps_bits_and_dtypes_on_every_layout(overrides, dtypes, tmp_path):
    def state(layout, engine, steps, *more):
        """After training up to so many steps from the latest checkpoint; only read if there are none to do."""
        degrees = [f"parallel.{axis}={layout.size(axis)}" for axis in ("tp", "pp", "ep", "etp")]
        sizes = ["model.num_experts=8", "model.expert_features=12"]
        settings = [*SMALL, *sizes, *degrees, f"memory.data_parallel={engine}", *more, *overrides, "train.steps=2"]
        config = load_config("tiny_moe", [], settings, world=layout.world).config

        def on_rank(groups):
            training = assemble(config, groups)
            restore(training, run)
            return copied(training.engine.state_tensors())

        def trained(groups):
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
                loop.train(config, run, resume=False, groups=groups)

        run = RunDirectory(tmp_path / "run")
        with short_corpus():
            if steps:
                RunDirectory.create(run.path, config_toml=to_toml(config), command="", environment={})
                run_distributed(layout, trained, timeout_s=20, **mesh_of(config, layout))
            if layout.world == 1:
                parts = [on_rank(AxisGroups())]
            else:
                parts = run_distributed(layout, on_rank, timeout_s=20, **mesh_of(config, layout))
        return assembled(parts, str(layout))

    expected = state(ParallelLayout(world=2, tp=2, ep=2), "zero1", 2)
    assert {tensor.dtype for tensor in expected.values()} == dtypes
    for layout, engine, *more in (
        (ParallelLayout(world=1), "zero1"),
        (ParallelLayout(world=2), "fsdp"),
        (ParallelLayout(world=4), "fsdp", "memory.shard_replicas=2"),
        (ParallelLayout(world=4, tp=2, pp=2), "zero1"),
        (ParallelLayout(world=4, tp=2, etp=2, ep=2), "zero1"),
    ):
        found = state(layout, engine, 0, *more)
        assert set(found) == set(expected)
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name].flatten().view(torch.uint8), tensor.flatten().view(torch.uint8)), name


@pytest.mark.dist
@pytest.mark.parametrize(
    "overrides", [(), ('optim.groups=[{pattern="*.q_proj.weight", rows=[8]}]',)], ids=["", "heads"]
)
def test_muon_does_not_depend_on_the_layout(overrides):
    config = small_config(
        "model.num_layers=2", "model.num_experts=8", "model.expert_features=12", "optim.kind=muon", *overrides
    )
    chosen = [
        Case(world=world, parallel=ParallelConfig(**degrees), engine=engine, microbatch_sequences=2)
        for world, engine, degrees in (
            (2, "zero1", {"tp": 2, "ep": 2}),
            (4, "fsdp", {"ep": 2}),
            (4, "zero1", {"tp": 2, "etp": 2}),
            (4, "zero1", {"pp": 2}),
        )
    ]
    with short_corpus():
        for deviation in verify(config, chosen, steps=3, timeout_s=20, data=load_data(config)):
            assert deviation.holds, deviation
