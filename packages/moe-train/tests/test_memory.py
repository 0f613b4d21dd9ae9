"""Peak memory by phase and class in every run, and the report of a rank that runs out of it."""

import gc
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout

import pytest
import torch

from moe_memory import LiveBytes, Zero1
from moe_memory.measure import MEMORY_CLASSES, Owner
from moe_parallel import ParallelLayout, run_distributed
from moe_train import loop
from moe_train.assemble import assemble
from moe_train.config.checks import mesh_of
from moe_train.config.load import load_config
from moe_train.config.toml import to_toml
from moe_train.data.microbatches import next_step
from moe_train.memory.report import OutOfMemoryError, is_out_of_memory
from moe_train.memory.watch import MEASURED_STEPS, by_unit
from moe_train.observe.console import memory_line
from moe_train.observe.jsonl import read_jsonl
from moe_train.observe.record import MemoryRecord, PhaseMemory
from moe_train.run_directory import RunDirectory
from moe_train.step import run_step
from moe_train.testing import SMALL, measured_steps, short_corpus, small_config

PHASES = ["forward", "backward", "reduce", "update", "rest"]
GIB = 2**30


def run_directory(path, config):
    return RunDirectory.create(path, config_toml=to_toml(config), command="", environment={})


def train(run, config, groups=None):
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), short_corpus():
        loop.train(config, run, resume=False, groups=groups)


def test_every_run_says_what_its_memory_consisted_of(tmp_path):
    config = small_config("train.steps=4", "data.sequence_length=100")
    run = run_directory(tmp_path / "run", config)
    train(run, config)
    records = list(read_jsonl(run.memory))
    assert [record["step"] for record in records] == [0, 1, 2]
    assert [list(record["phases"]) for record in records] == [["build"], PHASES, PHASES]
    with short_corpus():
        elements = sum(parameter.numel() for parameter in assemble(config).model.parameters())
    for record in records:
        assert (record["record"], record["rank"]) == ("memory", 0)
        for phase in record["phases"].values():
            assert list(phase["classes"]) == list(MEMORY_CLASSES)
            assert sum(phase["classes"].values()) == phase["tensor_bytes"]
            assert phase["process_bytes"] > phase["tensor_bytes"]
        assert record["rank_bytes"] == [max(phase["tensor_bytes"] for phase in record["phases"].values())]
    forward, backward, _, update, _ = records[-1]["phases"].values()
    # Flat storage ends with whole vectors.
    for name, times in (("parameters", 4), ("gradients", 4), ("optimizer", 8)):
        assert times * elements <= backward["classes"][name] <= 1.05 * times * elements
    assert forward["classes"]["activations"] > 0.5 * forward["tensor_bytes"]
    assert forward["classes"]["dispatch"] > 0
    assert backward["classes"]["temporary"] > forward["classes"]["temporary"]
    assert update["classes"]["activations"] < 0.01 * forward["classes"]["activations"]
    assert ["activations", "layers.*.experts"] in [owner[:2] for owner in forward["owners"]]
    # Later steps are not measured by class.
    peaks = [step["memory_peak_bytes"] for step in read_jsonl(run.metrics) if step["record"] == "step"]
    assert len(peaks) == 4
    largest = run.read_summary()["memory_peak_bytes"]
    assert list(largest) == ["step", "validation", "checkpoint"]
    assert largest["step"] == max(peaks)
    assert min(largest.values()) > 0


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("memory.recompute=full",),
        ('memory.recompute=["layernorm", "moe_act"]', 'memory.offload=["attn_norm"]', "memory.offload_min_elements=1"),
        ("memory.compute_dtype=bfloat16", "optim.exp_avg_sq_dtype=int8", "train.microbatch_sequences=2"),
        ("kernels.graphs=partial",),
    ],
)
def test_all_tensors_are_in_a_class(overrides):
    config = small_config("data.sequence_length=50", *overrides)
    with LiveBytes() as live:
        with short_corpus():
            training = assemble(config)
        for _ in range(MEASURED_STEPS):
            live.restart_peak()
            training.memory.account.restart()
            peak = measured_steps(training, 1)
            assert sum(peak.owners.values()) == peak.total_bytes == live.peak_bytes


def test_a_step_leaves_nothing_to_the_collection_of_garbage():
    """Cycles would keep tensors of a step beside those of the next."""
    with short_corpus():
        training = assemble(small_config())
    gc.collect()
    gc.disable()
    try:
        with LiveBytes() as live:
            lived = []
            for _ in range(3):
                measured_steps(training, 1)
                lived.append(live.live_bytes)
    finally:
        gc.enable()
    assert lived[1] == lived[2]


def test_measuring_changes_no_number():
    results = []
    for measured in (True, False):
        with short_corpus():
            training = assemble(small_config())
        found = []
        for updates in range(2):
            parts = next_step(training.data.train, training.cut).microbatches
            if measured:
                with training.memory.step():
                    result = run_step(training, parts, updates=updates, window=None)
            else:
                result = run_step(training, parts, updates=updates, window=None)
            found.append((result.loss, result.gradient_norm))
        assert bool(training.memory.account.peaks.get("forward")) is measured
        results.append(found)
    assert results[0] == results[1]


@pytest.mark.dist
def test_the_fullest_rank_reports(tmp_path):
    overrides = (
        "train.steps=2",
        "model.num_experts=8",
        "parallel.pp=2",
        "model.num_layers=3",
        "parallel.pipeline=Et|ttL",
    )
    config = load_config("tiny_moe", [], [*SMALL, *overrides], world=2).config
    run = run_directory(tmp_path / "run", config)
    layout = ParallelLayout(world=2, pp=2)
    run_distributed(layout, lambda mesh: train(run, config, mesh), **mesh_of(config, layout))
    *_, record = read_jsonl(run.memory)
    first, second = record["rank_bytes"]
    assert record["rank"] == int(second > first)
    assert max(first, second) == max(phase["tensor_bytes"] for phase in record["phases"].values())
    # The owners of all layers of a stage are one; that of two layers has more.
    assert any(owner[1].startswith("layers.*.") for owner in record["phases"]["forward"]["owners"])
    assert record["rank"] == 1


@pytest.mark.parametrize(("least", "units"), [(2**20, ["attn_norm", "moe_act"]), (3000, ["attn_norm"]), (1, [])])
def test_inputs_that_are_too_small_to_leave_are_named(least, units, tmp_path, caplog):
    offload = ('memory.offload=["attn_norm", "moe_act@layers.0"]', f"memory.offload_min_elements={least}")
    config = small_config("train.steps=3", "memory.offload_keep_layers=0", *offload)
    train(run_directory(tmp_path / "run", config), config)
    said = [record.getMessage() for record in caplog.records if "memory.offload" in record.getMessage()]
    assert sorted(line.split()[2].strip(",") for line in said) == units
    assert all(line.endswith(f"memory.offload_min_elements = {least}") for line in said)


def test_owners_of_all_layers_are_one():
    owners = {
        Owner("activations", "layers.0.moe_act"): 1,
        Owner("activations", "layers.11.moe_act"): 2,
        Owner("activations", "mtp.0.moe_act"): 4,
        Owner("temporary", "layers.0.moe_act"): 8,
        Owner("parameters", "layers.3.moe.experts.w1_ED2F"): 16,
    }
    assert by_unit(owners) == [
        (Owner("parameters", "layers.*.moe.experts.w1_ED2F"), 16),
        (Owner("temporary", "layers.*.moe_act"), 8),
        (Owner("activations", "mtp.*.moe_act"), 4),
        (Owner("activations", "layers.*.moe_act"), 3),
    ]


def test_the_line_on_the_console_names_what_counts():
    classes = dict.fromkeys(MEMORY_CLASSES, 0) | {"activations": 6 * GIB, "optimizer": 2 * GIB, "dispatch": 2**20}
    phase = PhaseMemory(process_bytes=9 * GIB, tensor_bytes=8 * GIB + 2**20, classes=classes, owners=[])
    small = PhaseMemory(process_bytes=1, tensor_bytes=1, classes=classes, owners=[])
    record = MemoryRecord(
        step=2, source="", rank=3, phases={"forward": phase, "update": small}, rank_bytes=[1, 2, 3, phase.tensor_bytes]
    )
    line = memory_line(record)
    assert line == "memory 8.001 GiB of tensors at most (rank 3, forward): activations 6.000, optimizer 2.000"


def test_an_update_that_does_not_fit_is_not_mended_by_fewer_activations(tmp_path, monkeypatch):
    def failing(*_):
        torch.empty(2**20)
        raise MemoryError("no room")

    monkeypatch.setattr(Zero1, "step", failing)
    config = small_config()
    with pytest.raises(OutOfMemoryError) as caught:
        train(run_directory(tmp_path / "run", config), config)
    assert "in step 1 of this process, in the phase update: " in str(caught.value)
    assert "temporary: update" in str(caught.value)
    assert str(caught.value).endswith("none that this configuration allows: take more ranks, or a smaller model")


LIMITED = """
import resource, sys
import torch
from moe_train.cli import main
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_AS, (size, size))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sets a limit on the address space")
def test_a_run_that_does_not_fit_says_why_and_what_to_do(tmp_path):
    """The allocator itself fails, in a process that may have 900 MiB more than it began with."""
    arguments = [*SMALL, "data.sequence_length=256", "train.global_batch_sequences=512"]
    arguments += ["train.microbatch_sequences=512", "train.steps=2"]
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            LIMITED,
            str(900 * 2**20),
            "run",
            "tiny_moe",
            *arguments,
            "--run-dir",
            str(tmp_path / "r"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 2, done.stderr
    report = (tmp_path / "r" / "out_of_memory-rank-00000.txt").read_text()
    assert report.strip() in done.stderr
    assert "Traceback" not in done.stderr
    lines = report.splitlines()
    assert lines[0].startswith("out of memory in the pass 'forward' of ")
    assert lines[0].endswith("microbatch 0, in step 1")
    assert "you tried to allocate" in lines[1]
    # The machine has more than this process may take.
    assert re.fullmatch(
        r"  this machine has .* GiB are free; this process may have \d\.\d{3} GiB of addresses \(ulimit -v\)", lines[2]
    )
    assert "in step 1 of this process, in the phase forward" in report
    assert "activations: layers.*." in report
    assert "1. 'train.microbatch_sequences=256'" in report or "1. 'memory.recompute=" in report
    assert "taken as three times its forward" in report


def test_a_later_step_that_does_not_fit_is_explained_by_the_last_that_was_measured(tmp_path, monkeypatch):
    """With what a device says, and where it happened."""
    config = small_config("train.steps=6")
    run = run_directory(tmp_path / "run", config)
    calls = []

    def failing(*arguments, **options):
        calls.append(None)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total ...\nmore")
        return run_step(*arguments, **options)

    monkeypatch.setattr(loop, "run_step", failing)
    with pytest.raises(OutOfMemoryError) as caught:
        train(run, config)
    lines = str(caught.value).splitlines()
    assert lines[:2] == [
        "out of memory in step 4",
        "  asked for 1.500 GiB: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total ...",
    ]
    assert "most in tensors in step 2 of this process, in the phase backward" in lines[3]
    assert sum("saves" in line for line in lines) == 3
    assert run.out_of_memory(0).read_text() == f"{caught.value}\n"
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("CUDA error: out of memory\nmore"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("[...] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes."), True),
        (MemoryError(), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            True,
        ),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("CUDA out of memory"), False),
    ],
)
def test_what_counts_as_out_of_memory(error, expected):
    assert is_out_of_memory(error) is expected


def test_what_is_beside_steps_is_named_too(tmp_path, monkeypatch):
    config = small_config("train.steps=1")
    for place, name in enumerate(("validation_loss", "save", "generate_text")):
        monkeypatch.undo()
        monkeypatch.setattr(loop, name, lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(OutOfMemoryError) as caught:
            train(run_directory(tmp_path / name, config), config)
        where = ("in the validation after step 1", "while step 1 was saved", "while the sample was written")[place]
        assert str(caught.value).splitlines()[:2] == [f"out of memory {where}", "  error: no room"]


def test_what_a_report_fails_of_does_not_hide_what_happened(tmp_path, monkeypatch):
    def failing(*_, **__):
        raise ZeroDivisionError("as it is")

    monkeypatch.setattr("moe_train.memory.report.ranked", failing)
    monkeypatch.setattr(loop, "run_step", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no room")))
    config = small_config("train.steps=1")
    with pytest.raises(MemoryError, match="no room") as caught:
        train(run_directory(tmp_path / "run", config), config)
    assert caught.value.__notes__ == ["in step 1", "of which no report could be made: ZeroDivisionError: as it is"]


def test_other_errors_pass_and_say_where_they_happened(tmp_path, monkeypatch):
    config = small_config("train.steps=2")
    run = run_directory(tmp_path / "run", config)
    monkeypatch.setattr(
        "moe_train.models.router.route", lambda *_, **__: (_ for _ in ()).throw(ZeroDivisionError("as it is"))
    )
    with pytest.raises(ZeroDivisionError, match="as it is") as caught:
        train(run, config)
    assert caught.value.__notes__ == ["in the pass 'forward' of layers.0, microbatch 0", "in step 1"]
    assert not run.out_of_memory(0).exists()
