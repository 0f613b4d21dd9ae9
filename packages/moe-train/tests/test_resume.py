"""An interrupted run ends as if it had never been interrupted: same metrics, same weights, same optimizer state.

Runs are forked children that end themselves with SIGKILL at a chosen moment, so every moment can be tried.
"""

import json
import os
import random
import signal
import sys

import pytest

from moe_train import loop
from moe_train.checkpoint.load import latest_checkpoint, read_index
from moe_train.cli import main
from moe_train.observe.record import WALL_CLOCK_FIELDS
from moe_train.testing import ALL_LOSSES, SMALL, short_corpus, small_config

ARGUMENTS = [
    "run",
    "tiny_moe",
    *SMALL,
    *ALL_LOSSES,
    "train.steps=9",
    "train.valid_interval_steps=2",
    "checkpoint.interval_steps=3",
    "checkpoint.keep=2",
]
KILLED = -signal.SIGKILL


def run_child(directory, *extra, before=lambda: None):
    """Run the command line in a forked child; its exit code, or minus the signal that ended it."""
    with short_corpus():
        loop.assemble(small_config())  # So that every child inherits the corpus and whatever is imported on first use.
    child = os.fork()
    if child == 0:
        code = 70
        try:
            sys.stdout = sys.stderr = (directory.parent / "output.txt").open("a", buffering=1)
            before()
            with short_corpus():
                code = main([*ARGUMENTS, "--run-dir", str(directory), *extra])
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_step(number):
    """Before: SIGKILL in the middle of step `number`, after its backward and before its update."""

    def patch():
        inner, calls = loop.run_step, 0

        def run_step(training, *args, **kwargs):
            nonlocal calls
            calls += 1
            if calls == number:
                training.engine.finish = die
            return inner(training, *args, **kwargs)

        loop.run_step = run_step

    return patch


def die_at_file_operation(directory, number):
    """Before: SIGKILL at the `number`-th operation on a file of a checkpoint."""

    def patch():
        marker, seen = str(directory / "checkpoints"), 0

        def hook(event, args):
            nonlocal seen
            if event.startswith(("open", "os.")) and any(str(arg).startswith(marker) for arg in args):
                seen += 1
                if seen == number:
                    die()

        sys.addaudithook(hook)

    return patch


def metrics(directory):
    """All records without what a clock or the memory of the process decides."""
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    loads = [json.loads(line) for line in (directory / "expert_load.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in WALL_CLOCK_FIELDS} for record in records], loads


def final_state(directory):
    path = latest_checkpoint(directory / "checkpoints")
    index = read_index(path)
    files = {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.suffix == ".safetensors"}
    return index.state, files


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole") / "run"
    assert run_child(directory) == 0
    return metrics(directory), final_state(directory)


def assert_same(directory, uninterrupted):
    records, state = metrics(directory), final_state(directory)
    assert records == uninterrupted[0]
    assert state == uninterrupted[1]


def test_the_uninterrupted_run_is_worth_comparing(uninterrupted):
    (records, loads), (state, files) = uninterrupted
    losses = [record["loss"] for record in records if "loss" in record]
    assert len(losses) == len(loads) == 9
    assert len(set(losses)) == 9
    assert [record["step"] for record in records if "valid_loss" in record] == [2, 4, 6, 8, 9]
    assert state["step"] == 9
    assert sum(len(content) for content in files.values()) > 50_000


@pytest.mark.parametrize("step", [1, 3, 5, 7, 9])
def test_r097_kill_in_a_step_and_resume(step, tmp_path, uninterrupted):
    directory = tmp_path / "run"
    assert run_child(directory, before=die_in_step(step)) == KILLED
    assert run_child(directory, "--resume") == 0
    assert_same(directory, uninterrupted)


@pytest.mark.parametrize("seed", range(10))
def test_kill_at_a_random_moment_of_a_save_and_resume(seed, tmp_path, uninterrupted):
    """Ten moments drawn from all file operations of the three saves of a run, each followed by a second kill."""
    directory = tmp_path / "run"
    draw = random.Random(seed)
    first = run_child(directory, before=die_at_file_operation(directory, draw.randint(1, 36)))
    assert first in (KILLED, 0)
    second = run_child(directory, "--resume", before=die_at_file_operation(directory, draw.randint(1, 36)))
    assert second in (KILLED, 0)
    assert KILLED in (first, second)
    assert run_child(directory, "--resume") == 0
    assert_same(directory, uninterrupted)


def test_resume_after_the_end_changes_nothing(tmp_path, uninterrupted):
    directory = tmp_path / "run"
    assert run_child(directory) == 0
    assert run_child(directory, "--resume") == 0
    assert_same(directory, uninterrupted)


def test_a_run_is_never_overwritten(tmp_path):
    directory = tmp_path / "run"
    assert run_child(directory, before=die_in_step(2)) == KILLED
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert run_child(directory) == 2
    assert run_child(directory, "--resume", "optim.lr=0.001") == 2
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before
    output = (tmp_path / "output.txt").read_text()
    assert "--resume" in output
    assert "optim.lr" in output


@pytest.mark.parametrize("damage", ["missing shard", "flipped byte", "truncated index", "truncated shard"])
def test_a_damaged_checkpoint_ends_in_an_error_that_names_the_file(damage, tmp_path):
    directory = tmp_path / "run"
    assert run_child(directory) == 0
    path = latest_checkpoint(directory / "checkpoints")
    shard = next(path.glob("*.safetensors"))
    victim = path / "index.json" if "index" in damage else shard
    content = victim.read_bytes()
    if damage == "missing shard":
        victim.unlink()
    elif damage == "flipped byte":
        victim.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    else:
        victim.write_bytes(content[: len(content) // 2])
    assert run_child(directory, "--resume") == 2
    assert victim.name in (tmp_path / "output.txt").read_text().splitlines()[-1]
