"""Router choices of one run, forced in another: layouts then agree in float32 too, where near-ties would flip."""

import json
import os
from contextlib import redirect_stdout

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe_parallel import ParallelLayout, run_distributed
from moe_train import loop
from moe_train.cli import main
from moe_train.config.checks import mesh_of
from moe_train.config.load import load_config
from moe_train.config.toml import to_toml
from moe_train.errors import MoeTrainError
from moe_train.run_directory import RunDirectory
from moe_train.testing import ALL_LOSSES, SMALL, short_corpus

# Seven sequences to four ranks: one has a sequence of padding.
BASE = [
    *SMALL,
    *ALL_LOSSES,
    "model.num_experts=8",
    "model.expert_features=12",
    "train.global_batch_sequences=7",
    "train.microbatch_sequences=3",
]


def train(path, layout, *overrides):
    degrees = [f"parallel.{axis}={layout.size(axis)}" for axis in ("tp", "cp", "pp", "ep", "etp")]
    settings = [*BASE, "train.steps=4", *degrees, *overrides]
    config = load_config("tiny_moe", [], settings, world=layout.world).config
    run = RunDirectory.create(path, config_toml=to_toml(config), command="", environment={})

    def on_rank(mesh):
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            loop.train(config, run, resume=False, groups=mesh)

    with short_corpus():
        run_distributed(layout, on_rank, timeout_s=20, **mesh_of(config, layout))
    lines = run.metrics.read_text().splitlines()
    loads = [json.loads(line)["counts"] for line in run.expert_load.read_text().splitlines()]
    return [json.loads(line)["loss"] for line in lines if '"loss"' in line], loads


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("recorded") / "run"
    losses, loads = train(path, ParallelLayout(world=1), "observe.record_choices=true", "memory.recompute=full")
    return path, losses, loads


@pytest.mark.dist
@pytest.mark.parametrize(
    "degrees",
    [
        {"world": 1},
        {"world": 2},
        {"world": 4, "ep": 4},
        {"world": 4, "tp": 2, "cp": 2, "etp": 2},
        {"world": 2, "pp": 2},
    ],
)
def test_r077_another_layout_repeats_the_choices(degrees, recorded, tmp_path):
    path, losses, loads = recorded
    found, found_loads = train(tmp_path / "run", ParallelLayout(**degrees), f"train.replay_choices={path}")
    assert found == pytest.approx(losses, rel=1e-5)
    assert found_loads == loads


@pytest.mark.dist
@pytest.mark.parametrize("degrees", [{"tp": 2, "cp": 2, "ep": 2}, {"pp": 2, "ep": 2}])
def test_ranks_that_share_rows_or_layers_record_what_one_process_records(degrees, recorded, tmp_path):
    """Once, by sequence of the global order; the loads show that the choices are those of the step."""
    layout = ParallelLayout(world=4, **degrees)
    _, loads = train(tmp_path / "run", layout, "observe.record_choices=true")
    for step, counts in enumerate(loads, 1):
        files = sorted((tmp_path / "run" / "choices").glob(f"step-{step:08d}-*"))
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert tensors.keys() == load_file(recorded[0] / "choices" / f"step-{step:08d}-rank-00000.safetensors").keys()
        for layer, expected in enumerate(counts):
            ids = torch.cat([t.flatten() for name, t in tensors.items() if name.endswith(f"layers.{layer}")])
            assert torch.bincount(ids[ids >= 0].long(), minlength=8).tolist() == expected
    again, _ = train(tmp_path / "again", ParallelLayout(world=1), f"train.replay_choices={tmp_path / 'run'}")
    assert len(again) == 4


@pytest.mark.dist
def test_choices_that_differ_from_the_router_s_own_are_forced(recorded, tmp_path):
    """All tokens to experts 2 and 5, which no router would choose."""
    path, losses, _ = recorded
    copy = tmp_path / "edited"
    (copy / "choices").mkdir(parents=True)
    for file in (path / "choices").iterdir():
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        tensors = load_file(file)
        forced = {n: torch.tensor([2, 5], dtype=t.dtype).expand_as(t).contiguous() for n, t in tensors.items()}
        save_file(forced, copy / "choices" / file.name, metadata)
    found, loads = train(tmp_path / "run", ParallelLayout(world=2, ep=2), f"train.replay_choices={copy}")
    tokens = 7 * 13
    assert loads[0] == [[0, 0, tokens, 0, 0, tokens, 0, 0]] * 2
    assert all(mine != pytest.approx(theirs, rel=1e-5) for mine, theirs in zip(found, losses, strict=True))


def test_a_recording_has_every_choice_of_every_step(recorded):
    path, _, loads = recorded
    files = sorted(file.name for file in (path / "choices").iterdir())
    assert files == [f"step-{step:08d}-rank-00000.safetensors" for step in range(1, 5)]
    for file, counts in zip(files, loads, strict=True):
        tensors = load_file(path / "choices" / file)
        assert len(tensors) == 2 * 7
        for layer, expected in enumerate(counts):
            ids = torch.cat([t.flatten() for name, t in tensors.items() if name.endswith(f"layers.{layer}")])
            assert torch.bincount(ids[ids >= 0].long(), minlength=8).tolist() == expected


@pytest.mark.dist
@pytest.mark.parametrize(
    ("change", "words"),
    [("data.seed=5", "are those of another batch"), ("train.steps=5", "no router choices of step 5 are recorded")],
)
def test_a_recording_that_does_not_fit_is_refused(change, words, recorded, tmp_path):
    with pytest.raises(MoeTrainError, match=words):
        train(tmp_path / "run", ParallelLayout(world=1), f"train.replay_choices={recorded[0]}", change)


def test_recording_what_is_repeated_is_refused(capsys):
    assert main(["run", "tiny_moe", "observe.record_choices=true", "train.replay_choices=somewhere"]) == 2
    assert "choices that are repeated are recorded already" in capsys.readouterr().err
