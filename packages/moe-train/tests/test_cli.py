"""Every command of `moe-train`, called as a user calls it. What training itself does is tested elsewhere."""

import json
import logging
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from moe_train.cli import COMMANDS, main
from moe_train.config.describe import describe
from moe_train.config.load import load_config
from moe_train.config.toml import to_toml
from moe_train.errors import MoeTrainError
from moe_train.observe.metrics import METRICS


@pytest.fixture
def training(monkeypatch, tmp_path):
    """Work in an empty folder with a loop that only notes how it was called: (config, run, resume)."""
    calls = []

    def train(config, run, *, resume, groups, topology):
        calls.append((config, run, resume))
        logging.getLogger("moe_train.loop").info("trained")

    module = types.ModuleType("moe_train.loop")
    module.train = train
    monkeypatch.setitem(sys.modules, "moe_train.loop", module)
    monkeypatch.chdir(tmp_path)
    return calls


def test_run_prepares_a_numbered_directory_and_trains_in_it(training, capsys, tmp_path):
    assert main(["run", "tiny_moe", "train.steps=3"]) == 0
    assert main(["run", "tiny_moe", "--train.steps=4"]) == 0
    (first, run, resume), (second, other, _) = training
    assert (first.train.steps, second.train.steps, resume) == (3, 4, False)
    assert [str(run.path), str(other.path)] == ["runs/tiny_moe-1", "runs/tiny_moe-2"]
    assert load_config(str(run.config)).config == first
    described = json.loads(run.environment.read_text())
    assert described["command"] == "moe-train run tiny_moe train.steps=3"
    assert described["seed"] == 0
    assert described["versions"]["torch"]
    assert "trained" in run.log(0).read_text()
    assert run.checkpoints.is_dir()
    out = capsys.readouterr().out
    assert "run directory: runs/tiny_moe-1" in out
    assert str(run.report) in out


def test_run_takes_files_and_options_in_any_order(training, tmp_path):
    (tmp_path / "a.toml").write_text("[train]\nsteps = 5\nseed = 5\n")
    where = str(tmp_path / "here")
    assert (
        main(["run", "tiny_moe", "train.seed=6", "--run-dir", where, "a.toml", "--optim.lr=1e-4", "train.seed=7"]) == 0
    )
    ((config, run, _),) = training
    assert (config.train.steps, config.train.seed, config.optim.lr) == (5, 7, 1e-4)
    assert str(run.path) == where


def test_the_resolved_configuration_of_a_run_is_a_recipe(training):
    assert main(["run", "tiny_moe", "train.steps=3"]) == 0
    assert main(["run", "runs/tiny_moe-1/config.toml"]) == 0
    (first, _, _), (again, run, _) = training
    assert again == first
    assert str(run.path) == "runs/tiny_moe-1-1"


def test_the_command_script_trains_the_same_again(training, tmp_path):
    main(["run", "tiny_moe", "train.steps=3", "observe.sample_prompt=it's\nus"])
    script = tmp_path / "runs/tiny_moe-1/command.sh"
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "moe-train").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tools / "moe-train").chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    done = subprocess.run([script, "train.seed=2"], env={"PATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["run", f"{script.parent}/config.toml", "train.seed=2"]


def test_run_overwrites_nothing(training, capsys):
    assert main(["run", "tiny_moe", "--run-dir", "here"]) == 0
    assert main(["run", "tiny_moe", "--run-dir", "here"]) == 2
    assert "here holds a run already; continue it with --resume" in capsys.readouterr().err
    os.mkdir("there")
    Path("there/thesis.tex").touch()
    assert main(["run", "tiny_moe", "--run-dir", "there"]) == 2
    assert "there is not empty and holds no run" in capsys.readouterr().err
    assert os.listdir("there") == ["thesis.tex"]
    assert len(training) == 1


def test_resume_continues_the_same_configuration(training):
    assert main(["run", "tiny_moe", "train.steps=3", "--run-dir", "here"]) == 0
    before = Path("here/env.json").read_text()
    assert main(["run", "tiny_moe", "train.steps=3", "--run-dir", "here", "--resume"]) == 0
    assert main(["run", "here/config.toml", "--run-dir", "here", "--resume"]) == 0
    assert [resume for _, _, resume in training] == [False, True, True]
    assert training[1][:2] == training[0][:2]
    assert Path("here/env.json").read_text() == before


def test_resume_refuses_another_configuration_and_shows_the_difference(training, capsys):
    main(["run", "tiny_moe", "train.steps=3", "--run-dir", "here"])
    assert main(["run", "tiny_moe", "data.seed=2", "train.threads=2", "--run-dir", "here", "--resume"]) == 2
    message = capsys.readouterr().err
    assert "train.steps: 3 -> 200" in message
    assert "data.seed: 0 -> 2" in message
    assert "train.threads" not in message  # how fast the same numbers come may change
    assert "moe-train run here/config.toml --run-dir here --resume" in message
    assert len(training) == 1


def test_resume_moves_to_the_other_engine_and_state_to_the_host(training):
    """Without what only the first engine was told, which the other one refuses, and what fits its ranks alone."""
    told = ("memory.data_parallel=fsdp", "memory.prefetch_units=2", "memory.reshard.expert=step")
    assert main(["run", "tiny_moe", *told, "memory.shard_replicas=1", "--run-dir", "here"]) == 0
    moved = ("memory.bucket_mib=1", "optim.offload=step", "optim.offload_fraction=0.5")
    assert main(["run", "tiny_moe", *moved, "--run-dir", "here", "--resume"]) == 0
    assert [resume for _, _, resume in training] == [False, True]


def test_resume_shards_state_over_other_runs_of_replicas(training):
    """What fits a number of ranks would forbid every other number."""
    assert main(["run", "tiny_moe", "memory.shard_replicas=1", "--run-dir", "here"]) == 0
    assert main(["run", "tiny_moe", "memory.bucket_mib=1", "--run-dir", "here", "--resume"]) == 0
    assert [resume for _, _, resume in training] == [False, True]


def test_resume_needs_a_run(training, capsys):
    assert main(["run", "tiny_moe", "--resume"]) == 2
    assert "--resume needs --run-dir" in capsys.readouterr().err
    assert main(["run", "tiny_moe", "--run-dir", "nowhere", "--resume"]) == 2
    assert "nowhere holds no run" in capsys.readouterr().err
    assert not os.path.exists("nowhere")


def test_resume_warns_about_other_versions(training, capsys):
    main(["run", "tiny_moe", "--run-dir", "here"])
    described = json.loads(Path("here/env.json").read_text())
    described["versions"]["torch"] = "0.1"
    Path("here/env.json").write_text(json.dumps(described))
    main(["run", "tiny_moe", "--run-dir", "here", "--resume"])
    assert "resumed with other versions, so bits may differ: torch 0.1 ->" in capsys.readouterr().err


def test_a_user_error_in_training_is_one_message_and_a_bug_a_traceback(training, monkeypatch, capsys):
    def fail(error):
        def train(config, run, *, resume, groups, topology):
            raise error

        monkeypatch.setattr(sys.modules["moe_train.loop"], "train", train)

    fail(MoeTrainError("the corpus is damaged"))
    assert main(["run", "tiny_moe"]) == 2
    assert capsys.readouterr().err == "moe-train: the corpus is damaged\n"
    assert "Traceback" in Path("runs/tiny_moe-1/log.txt").read_text()
    fail(ValueError("a bug"))
    with pytest.raises(ValueError, match="a bug"):
        main(["run", "tiny_moe"])
    fail(KeyboardInterrupt())
    assert main(["run", "tiny_moe", "--run-dir", "here"]) == 130
    message = capsys.readouterr().err
    assert message == "interrupted; to continue: moe-train run here/config.toml --run-dir here --resume\n"


def test_logging_is_set_up_for_the_run_only(training):
    before = list(logging.getLogger().handlers), logging.getLogger("moe_kernels").level
    main(["run", "tiny_moe"])
    assert (list(logging.getLogger().handlers), logging.getLogger("moe_kernels").level) == before


def test_configuration_errors_leave_no_directory(training, capsys):
    assert main(["run", "tiny_moe", "optim.lrr=1", "train.steps=x", "parallel.tp=3"]) == 2
    assert capsys.readouterr().err.startswith("moe-train: 3 errors in the configuration:\n")
    assert not os.path.exists("runs")


def test_config_show_prints_a_file_that_loads(capsys, tmp_path):
    assert main(["config", "show", "tiny_moe", "train.steps=3"]) == 0
    path = tmp_path / "all.toml"
    path.write_text(capsys.readouterr().out)
    assert load_config(str(path)).config == load_config("tiny_moe", [], ["train.steps=3"]).config


def test_config_show_why(capsys):
    assert main(["config", "show", "tiny_moe", "train.steps=3", "--why", "train.steps"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == " -> 3  command line"
    assert main(["config", "show", "tiny_moe", "--why", "train.stepz"]) == 2


def test_config_check(capsys):
    assert main(["config", "check", "tiny_moe", "parallel.ep=4", "--world", "8"]) == 0
    assert capsys.readouterr().out == "legal on 8 ranks: tiny_moe, 1 option set on top of it\n"
    assert main(["config", "check", "tiny_moe", "parallel.ep=4"]) == 2
    assert "parallel.ep = 4  (command line)" in capsys.readouterr().err


def test_config_diff_of_recipe_file_and_run(training, capsys, tmp_path):
    (tmp_path / "all.toml").write_text(to_toml(load_config("tiny_moe", [], ["train.seed=9"]).config))
    main(["run", "tiny_moe", "train.steps=3", "--run-dir", "here"])
    capsys.readouterr()
    assert main(["config", "diff", "all.toml", "here"]) == 0
    assert capsys.readouterr().out == "train.steps: 200 -> 3\ntrain.seed: 9 -> 0\n"
    assert main(["config", "diff", "tiny_moe", "tiny_moe"]) == 0
    assert capsys.readouterr().out == "no difference\n"


def test_explain_a_metric_by_name_and_by_label(capsys):
    assert main(["explain", "balance"]) == 0
    out = capsys.readouterr().out
    assert "Largest over mean expert load" in out
    assert "max_e(n_e) / mean_e(n_e)" in out
    assert "1.00 is perfect" in out
    assert main(["explain", "tok/s"]) == 0
    assert capsys.readouterr().out.startswith("tokens_per_second (on the console: tok/s), tokens/s\n")
    assert main(["explain", "memory"]) == 0
    assert "more     memory/parameters, memory/gradients, " in capsys.readouterr().out


def test_explain_lists_all_and_suggests(capsys):
    assert main(["explain"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [metric.name for metric in METRICS]
    assert main(["explain", "balanse"]) == 2
    assert "did you mean 'balance'?" in capsys.readouterr().err


def test_explain_an_option(capsys):
    assert main(["explain", "memory.reshard.dense"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "memory.reshard.dense"
    assert lines[2:] == ['  values   "forward" or "backward" or "step"', '  default  "forward"']
    assert main(["explain", "comm.lanes"]) == 0  # of another dispatcher than the default
    assert "consecutive parts of the tokens" in capsys.readouterr().out
    assert main(["explain", "memory.recomput"]) == 2
    assert "there is no option 'memory.recomput'; did you mean memory.recompute?" in capsys.readouterr().err


def test_every_option_of_a_recipe_is_explained():
    for key in load_config("tiny_deepseek_v3").history:
        found = describe(key)
        assert found.text, key
        assert found.values, key


def test_report_of_a_run(training, capsys):
    main(["run", "tiny_moe", "--run-dir", "here"])
    capsys.readouterr()
    assert main(["report", "here"]) == 0
    assert capsys.readouterr().out == "here/report.html\n"
    assert os.path.getsize("here/report.html") > 1000
    assert main(["report", "nowhere"]) == 2


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for distribution in ("parallel", "kernels", "comm", "memory", "train"):
        assert any(line.startswith(f"OK    moe-stack-{distribution} ") for line in lines)
    assert any(line.split()[:3] == ["OK", "dispatcher", "local"] for line in lines)
    assert any(line.split()[1] == "cuda" for line in lines if line)


def test_doctor_as_json(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert {line["kind"] for line in found["plugins"]} == {
        *("dispatcher", "grouped GEMM backend", "model family", "recipe", "sink")
    }
    assert {"name": "jsonl", "kind": "sink"}.items() <= found["plugins"][-1].items()


def test_doctor_says_what_strangers_lack_and_stays_well(install, capsys):
    source = """
from moe_train.plugins import RecipePlugin
RECIPE = RecipePlugin(name="huge", interface_version=1, summary="", build=None, available=lambda: "needs 64 GPUs")
"""
    install("acme-recipes", "[moe_train.recipes]\nhuge = acme_recipes:RECIPE\nlost = acme_recipes:LOST\n", source)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^MISS +recipe +huge +acme-recipes 1\.5 +needs 64 GPUs$", out, re.MULTILINE)
    assert "'lost' of acme-recipes 1.5 could not be loaded: AttributeError" in out


def test_doctor_fails_when_something_of_ours_is_broken(install, capsys):
    install("moe-stack-extra", "[moe_train.sinks]\nextra = moe_stack_extra:SINK\n", "import no_such_module\n")
    assert main(["doctor"]) == 1
    assert "This installation is broken:\nsink 'extra' of moe-stack-extra" in capsys.readouterr().out
    assert main(["doctor", "--json"]) == 1


def test_plugins(capsys):
    assert main(["plugins"]) == 0
    assert "recipe" in capsys.readouterr().out
    assert main(["plugins", "--json"]) == 0
    names = {(line["kind"], line["name"]) for line in json.loads(capsys.readouterr().out)}
    assert {("recipe", "tiny_moe"), ("model family", "decoder"), ("sink", "jsonl"), ("dispatcher", "local")} <= names


@pytest.mark.parametrize(
    "arguments", [[name] for name in COMMANDS] + [["config", name] for name in ("show", "check", "diff")]
)
def test_every_command_has_help(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--help"])
    assert ended.value.code == 0
    assert f"moe-train {' '.join(arguments)}" in capsys.readouterr().out


def test_no_command_prints_help_and_an_unknown_one_lists_them(capsys):
    assert main([]) == 2
    assert "explain" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["trian"])
    assert ended.value.code == 2
    assert "run" in capsys.readouterr().err


def test_options_are_not_abbreviated(capsys):
    with pytest.raises(SystemExit):
        main(["run", "tiny_moe", "--res"])
    assert "--res" in capsys.readouterr().err


def test_python_dash_m_and_a_reader_that_leaves():
    command = f"set -o pipefail; {sys.executable} -m moe_train explain | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0], done.stderr) == (0, "step", "")


def test_messages_on_screen_go_to_the_standard_error_of_the_moment(tmp_path, capsys):
    from moe_train.cli.run import logging_to

    with logging_to(tmp_path / "log.txt"):
        logging.getLogger("moe_memory").warning("careful")
        logging.getLogger("moe_memory").info("chosen")
    assert capsys.readouterr().err == "WARNING: careful\n"
    assert "chosen" in (tmp_path / "log.txt").read_text()
