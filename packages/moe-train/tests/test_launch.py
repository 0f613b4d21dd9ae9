"""`--nproc` and torchrun: real processes, from the command line to the last file."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from moe_parallel import ParallelLayout
from moe_train.cli import main
from moe_train.launch.local import LaunchError, launch
from moe_train.testing import SMALL

pytestmark = pytest.mark.dist

SETTINGS = [*SMALL, "model.num_experts=8", "parallel.ep=2", "parallel.timeout_s=20", "train.steps=3"]

# Python imports it in every process that has this folder on its path; it plays the fault that a test asks for.
FAULTS = """
import os

if os.environ.get("RANK") == "1" and (fault := os.environ.get("PLAYED_FAULT")):
    import atexit
    import signal
    import time

    import moe_train.loop as loop
    from moe_memory.data_parallel.sharded import ShardedEngine
    from moe_train.errors import MoeTrainError

    def run_step(*args, **kwargs):
        if fault.endswith("end late"):
            atexit.register(time.sleep, 6)
        if fault.startswith("raise in the backward"):
            ShardedEngine.grads_ready = fail
            return train_step(*args, **kwargs)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "stay away":
            time.sleep(60)
        fail()

    def fail(*args, **kwargs):
        raise MoeTrainError("the data of this rank are damaged")

    train_step, loop.run_step = loop.run_step, run_step
"""


def run(tmp_path, *arguments, fault="", launcher=("-m", "moe_train", "run")):
    command, environment = prepare(tmp_path, *arguments, fault=fault, launcher=launcher)
    return subprocess.run(
        command, check=False, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )


def prepare(tmp_path, *arguments, fault="", launcher=("-m", "moe_train", "run")):
    site = tmp_path / "site"
    site.mkdir(exist_ok=True)
    (site / "sitecustomize.py").write_text(FAULTS)
    environment = {**os.environ, "PLAYED_FAULT": fault, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(site)}
    command = [sys.executable, *launcher, "tiny_moe", *SETTINGS, "--run-dir", str(tmp_path / "run"), *arguments]
    return command, environment


def processes_of(tmp_path):
    """Command lines of living processes that belong to this test."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                line = file.read().decode(errors="replace")
        except OSError:
            continue
        if str(tmp_path) in line:
            found.append(line)
    return found


def assert_nothing_is_left(tmp_path):
    deadline = time.monotonic() + 5
    while processes_of(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of(tmp_path) == []


def test_nproc_trains_and_only_the_first_rank_speaks(tmp_path):
    ended = run(tmp_path, "--nproc", "2")
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    lines = ended.stdout.splitlines()
    assert sum(line.startswith("run directory: ") for line in lines) == 1
    assert sum(line.startswith("step ") for line in lines) == 2
    folder = tmp_path / "run"
    assert "moe_comm.auto: dispatcher: alltoall" in (folder / "logs" / "rank-00001.txt").read_text()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4
    assert (folder / "report.html").exists()
    assert_nothing_is_left(tmp_path)


def test_what_repeats_or_continues_a_run_starts_as_many_ranks(tmp_path):
    assert run(tmp_path, "--nproc", "2").returncode == 0
    *_, started, script = (tmp_path / "run" / "command.sh").read_text().splitlines()
    assert started.endswith(" --nproc 2")
    assert script == 'exec moe-train run "$(dirname "$0")/config.toml" --nproc 2 "$@"'
    refused = run(tmp_path, "--nproc", "2", "--resume", "train.seed=9")
    assert any(line.endswith(" --resume --nproc 2") for line in refused.stderr.splitlines())


def test_torchrun_works_too(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "moe_train", "run")
    ended = run(tmp_path, launcher=launcher)
    assert ended.returncode == 0, ended.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3, 3]


DAMAGED = "MoeTrainError: the data of this rank are damaged; in step 1; on rank 1 of 2 (dp=1 ep=1)"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill", "rank 1 of 2 (dp=1 ep=1) ended with SIGKILL"),
        ("raise", DAMAGED),
        # The launcher sees the other rank end first, which only lost its peer.
        ("raise, and end late", DAMAGED),
    ],
)
def test_a_rank_that_fails_ends_all_and_is_named(fault, words, tmp_path):
    ended = run(tmp_path, "--nproc", "2", fault=fault)
    assert ended.returncode == 2
    assert ended.stderr.splitlines()[-1] == f"moe-train: all ranks were ended after the first failure: {words}"
    assert_nothing_is_left(tmp_path)


KILLED = "rank 1 of 3 (dp=1 edp=1) ended with SIGKILL"


@pytest.mark.parametrize(
    ("exits", "later_s", "first"),
    [
        # Rank 0 lost its peer, and says so; of the others nobody has heard.
        ({0: 1, 1: -signal.SIGKILL, 2: -signal.SIGTERM}, 1, KILLED),
        ({0: 1, 1: -signal.SIGTERM}, 1, "CollectiveError: lost"),
        # The launcher asks in vain for half a minute, and then kills.
        ({0: 1, 1: -signal.SIGKILL}, 30, "CollectiveError: lost"),
        ({1: -signal.SIGTERM}, 0, "rank 1 of 3 (dp=1 edp=1) ended with SIGTERM"),
    ],
)
def test_of_failures_at_one_time_the_cause_is_the_first(exits, later_s, first, tmp_path, monkeypatch):
    file, start = recorded(tmp_path, 0, "CollectiveError: lost"), int(time.time())
    monkeypatch.setattr(time, "time", lambda: start + later_s)
    failures = {
        rank: ProcessFailure(rank, pid=rank, exitcode=code, error_file=file if rank == 0 else str(tmp_path / "none"))
        for rank, code in exits.items()
    }
    assert first_of(failures, monkeypatch) == first


def test_what_a_rank_says_of_another_is_not_the_first_failure(tmp_path, monkeypatch):
    said = ("RankError: rank 1: CheckpointError: no space; on rank 0", "CheckpointError: no space; on rank 1")
    failures = {
        rank: ProcessFailure(rank, pid=rank, exitcode=1, error_file=recorded(tmp_path, rank, words))
        for rank, words in enumerate(said)
    }
    assert first_of(failures, monkeypatch) == said[1]


def test_of_a_report_the_launcher_repeats_the_first_line_and_the_place(tmp_path, monkeypatch):
    """The rank itself has printed it."""
    words = "OutOfMemoryError: in step 3\n  parameters 1 GiB\n  try this\non rank 0"
    failures = {0: ProcessFailure(0, pid=0, exitcode=1, error_file=recorded(tmp_path, 0, words))}
    assert first_of(failures, monkeypatch) == "OutOfMemoryError: in step 3; on rank 0"


def recorded(tmp_path, rank, words):
    """What a rank leaves for torch's launcher."""
    file = tmp_path / f"error-{rank}.json"
    file.write_text(json.dumps({"message": {"message": words, "extraInfo": {"timestamp": int(time.time())}}}))
    return str(file)


def first_of(failures, monkeypatch):
    """What is said to be first where torch's launcher has seen these."""

    def elastic_launch(config, entrypoint):
        def run(*arguments):
            raise ChildFailedError("moe-train", failures)

        return run

    monkeypatch.setattr("torch.distributed.launcher.api.elastic_launch", elastic_launch)
    with pytest.raises(LaunchError) as caught:
        launch([], ParallelLayout(world=3))
    before, _, found = str(caught.value).partition(": ")
    assert before == "all ranks were ended after the first failure"
    return found


def test_a_peer_that_is_lost_in_a_collective_of_torch_is_no_fault_of_the_program(tmp_path):
    """Those of `fully_shard` know no names; their failure is one line too, and not taken for the cause."""
    settings = ("memory.data_parallel=fsdp", "parallel.ep=1", "parallel.timeout_s=8")
    # Late, so that the other rank has the time to say what it knows.
    ended = run(tmp_path, "--nproc", "2", *settings, fault="raise in the backward, and end late")
    assert ended.returncode == 2
    place = "on rank 0 of 2 (dp=0 edp=0)"
    (lost,) = [line for line in ended.stderr.splitlines() if line.endswith(place)]
    reason = r"\[\S+\] (Timed out waiting 8000ms|Connection closed by peer)"
    assert re.match(rf"moe-train: rank 0: a collective of torch's own failed: {reason}", lost)
    assert "; rank 1 failed with MoeTrainError: the data of this rank are damaged; in step 1; " in lost
    words = "MoeTrainError: the data of this rank are damaged; in step 1; on rank 1 of 2 (dp=1 edp=1)"
    assert ended.stderr.splitlines()[-1] == f"moe-train: all ranks were ended after the first failure: {words}"
    assert "Traceback" not in ended.stderr


def test_a_rank_that_stays_away_is_named_by_the_others_in_time(tmp_path):
    """The error has the group and its ranks, the step, and the rank that waited."""
    ended = run(tmp_path, "--nproc", "2", "parallel.timeout_s=8", fault="stay away")
    assert ended.returncode == 2
    last = ended.stderr.splitlines()[-1]
    assert last.endswith("; on rank 0 of 2 (dp=0 ep=0)")
    assert re.search(r"CollectiveError: rank 0: \w+ in group .* of ranks 0, 1 failed after \d+\.\d s: ", last), last
    assert "; in step 1; " in last
    assert "no report from rank 1" in last
    assert_nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("sent", "code", "words"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 2, "ended by SIGTERM")]
)
def test_a_signal_to_the_launcher_ends_all_ranks(sent, code, words, tmp_path):
    command, environment = prepare(tmp_path, "--nproc", "2", "train.steps=100000")
    with subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as child:
        deadline = time.monotonic() + 60
        while not (tmp_path / "run" / "metrics.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        child.send_signal(getattr(signal, sent))
        _, errors = child.communicate(timeout=60)
    assert child.returncode == code
    assert words in errors.decode().splitlines()[-1]
    assert_nothing_is_left(tmp_path)


def test_mistakes_are_reported_once_before_anything_starts(tmp_path):
    ended = run(tmp_path, "--nproc", "3", "train.steps=none")
    assert ended.returncode == 2
    assert ended.stderr.count("train.steps") == 1
    assert ended.stderr.count("parallel.ep") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nproc", "0"], "--nproc 0: at least one rank has to run"),
        (["--nproc", "8", "parallel.tp=8"], "must divide model.num_heads = 4"),
        (["--nproc", "4", "train.global_batch_sequences=3"], "so that some would never have a token"),
        (["parallel.ep=2"], "does not divide the world of 1 ranks"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments, words, capsys):
    assert main(["run", "tiny_moe", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_nproc_inside_a_launcher_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["run", "tiny_moe", "--nproc", "2"]) == 2
    assert "a launcher has started this process already" in capsys.readouterr().err


def test_a_run_continues_on_another_layout_and_says_what_it_regrouped(tmp_path):
    assert run(tmp_path, "--nproc", "2", "checkpoint.interval_steps=2").returncode == 0
    (tmp_path / "run" / "checkpoints" / "step-00000003").rename(tmp_path / "last")
    changes = ["checkpoint.interval_steps=2", "parallel.ep=1", "memory.data_parallel=fsdp"]
    ended = run(tmp_path, "--resume", *changes)
    assert ended.returncode == 0, ended.stderr
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "continued with another setting: parallel.ep: 2 -> 1" in log
    assert "step-00000002 was written on another layout and is regrouped: world 2 -> 1, dp 2 -> 1, ep 2 -> 1" in log
    assert (tmp_path / "run" / "checkpoints" / "step-00000003" / "index.json").exists()
    refused = run(tmp_path, "--resume", *changes, "optim.lr=0.5")
    assert refused.returncode == 2
    assert "optim.lr" in refused.stderr
    assert "parallel.ep" not in refused.stderr.split("To continue it")[0]
