"""Records, the JSON-lines sink, the console and the table of metrics."""

import io
import json
from dataclasses import asdict, fields, replace

import pytest

from moe_kernels import PluginError
from moe_train.config.load import load_config
from moe_train.errors import MoeTrainError
from moe_train.models.flops import decoder_costs
from moe_train.observe.console import LEGEND, Console, headline, step_line, valid_line
from moe_train.observe.jsonl import JsonlSink, read_jsonl
from moe_train.observe.metrics import METRICS, metric
from moe_train.observe.notation import clock, fixed, short
from moe_train.observe.record import WALL_CLOCK_FIELDS, LoadRecord, StepRecord, StepTraffic, ValidRecord
from moe_train.observe.sink import open_sinks
from moe_train.run_directory import RunDirectory, next_free_directory

TRAFFIC = StepTraffic(
    network_bytes=3 << 20,
    node_bytes=2 << 20,
    self_bytes=1 << 20,
    metadata_bytes=4096,
    collectives=21,
    host_syncs=3,
    peak_buffer_bytes=1 << 19,
)
RECORD = StepRecord(
    step=20,
    loss=3.912,
    lr=3e-4,
    gnorm=1.21,
    balance=1.14,
    dead=0,
    num_experts=8,
    drop=0,
    aux_loss=1.02,
    seq_loss=0.0,
    global_loss=0.0,
    z_loss=4.5,
    mtp_loss=0.0,
    tokens=81920,
    skipped=False,
    step_seconds=0.0994,
    tokens_per_second=41_200.0,
    flops_per_second=0.24e12,
    work_balance=1.0,
    memory_peak_bytes=int(0.6 * 2**30),
    eta_seconds=41.2,
    comm=TRAFFIC,
)


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(tmp_path / "run", config_toml="", command="moe-train run x", environment={})


# The console


def test_the_line_is_the_promised_one():
    assert step_line(RECORD, 200) == (
        "step   20/200  loss 3.912  lr 3.0e-04  gnorm 1.21 | balance 1.14  dead 0/8  drop 0"
        " | 41.2k tok/s  0.24 TF/s | 0.6 GiB | eta 0:41"
    )


def test_lines_are_aligned_ascii_and_narrow():
    others = [
        replace(RECORD, step=1, loss=11.57, gnorm=123.4, tokens_per_second=982.0, flops_per_second=3.1e9),
        replace(RECORD, step=200, loss=0.0123, gnorm=0.004, dead=7, lr=0.0, tokens_per_second=1.234e6),
        replace(RECORD, loss=float("nan"), gnorm=float("inf"), memory_peak_bytes=139 * 2**30),
    ]
    lines = [step_line(record, 200) for record in [RECORD, *others]]
    columns = {tuple(i for i, character in enumerate(line) if character in "|/" and i < 110) for line in lines}
    assert len(columns) == 1
    assert all(line.isascii() for line in lines)
    large = replace(RECORD, step=1_000_000, num_experts=61 * 256, dead=15_616, drop=1_234_567, eta_seconds=1e6)
    assert max(map(len, [*lines, step_line(replace(large, skipped=True), 1_000_000)])) < 160


def test_a_skipped_step_says_so():
    assert step_line(replace(RECORD, skipped=True), 200).endswith("eta 0:41  SKIPPED")


def test_validation_lines_up_with_steps():
    line = valid_line(ValidRecord(step=20, valid_loss=2.0, valid_bits_per_byte=2.8854), 200)
    assert line == "valid  20/200  loss 2.000  2.885 bits/byte"
    assert line.index("/200") == step_line(RECORD, 200).index("/200")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((0, "0"), (982, "982"), (999.6, "1.00k"), (9_994, "9.99k"), (9_996, "10.0k"), (41_200, "41.2k")),
        *((99_960, "100k"), (412_000, "412k"), (1.5e6, "1.50M"), (30_532_122_624, "30.5G"), (2e12, "2.00T")),
        (5e15, "5000T"),
    ],
)
def test_short_numbers(value, text):
    assert short(value) == text


def test_fixed_width_numbers_and_clock():
    assert [fixed(value, 5) for value in (3.9124, 11.574, 0.01, 123.456, 99999.0)] == [
        *("3.912", "11.57", "0.010", "123.5", "99999")
    ]
    assert [clock(value) for value in (-1, 0.4, 41.2, 59.7, 3599.4, 7387, 1e6)] == [
        *("0:00", "0:00", "0:41", "1:00", "59:59", "2:03:07", "11d13h")
    ]


@pytest.fixture
def small():
    config = load_config("tiny_moe", [], ["train.steps=25", "observe.log_interval_steps=10"]).config
    return config, decoder_costs(config.model, 257)


def test_the_console_prints_first_last_and_every_nth_step(small):
    stream = io.StringIO()
    console = Console(*small, start_step=3, stream=stream)
    for step in range(4, 26):
        console.step(replace(RECORD, step=step, skipped=step == 17))
    console.valid(ValidRecord(step=25, valid_loss=2.0, valid_bits_per_byte=2.9))
    console.close()
    lines = stream.getvalue().splitlines()
    printed = [int(line[5:9]) for line in lines if line.startswith("step")]
    assert printed == [4, 10, 17, 20, 25]
    assert lines[-1].startswith("valid  25/25")
    assert "\x1b" not in stream.getvalue()


def test_the_console_begins_with_what_is_trained_and_what_columns_mean(small):
    stream = io.StringIO()
    Console(*small, stream=stream).close()
    assert stream.getvalue() == f"{headline(*small)}\n{LEGEND}\n"
    assert "25 steps of 16 sequences of 256 tokens" in headline(*small)
    assert "moe-train explain NAME" in LEGEND
    assert max(map(len, stream.getvalue().splitlines())) < 160
    assert stream.getvalue().isascii()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_console_of_a_terminal_shows_progress_and_keeps_lines_whole(small, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    stream = Terminal()
    console = Console(*small, stream=stream)
    for step in range(1, 26):
        console.step(replace(RECORD, step=step))
    console.close()
    console.close()
    console.valid(ValidRecord(step=25, valid_loss=2.0, valid_bits_per_byte=2.9))
    assert "\x1b" in stream.getvalue()
    assert step_line(replace(RECORD, step=20), 25) in stream.getvalue()
    assert stream.getvalue().endswith("2.900 bits/byte\n")


# Records and files


def test_records_are_json_lines_that_read_back(run):
    sink = JsonlSink(run, 0)
    valid = ValidRecord(step=20, valid_loss=1 / 3, valid_bits_per_byte=0.1)
    load = LoadRecord(step=20, counts=[[1, 2], [3, 0]])
    for record in (RECORD, valid, load):
        sink.write(record)
    sink.close()
    step_json, valid_json = read_jsonl(run.metrics)
    assert step_json.pop("record") == "step"
    comm = {name: step_json.pop(f"comm/{name}") for name in asdict(TRAFFIC)}
    assert StepRecord(**step_json, comm=StepTraffic(**comm)) == RECORD
    assert valid_json == {"record": "valid", "step": 20, "valid_loss": 1 / 3, "valid_bits_per_byte": 0.1}
    assert list(read_jsonl(run.expert_load)) == [{"record": "load", "step": 20, "counts": [[1, 2], [3, 0]]}]


def test_every_line_is_on_disk_when_write_returns(run):
    sink = JsonlSink(run, 0)
    sink.write(RECORD)
    assert run.metrics.read_text().endswith("}\n")
    sink.close()


def test_numbers_that_are_not_finite_become_null():
    line = json.loads(replace(RECORD, loss=float("nan"), gnorm=float("inf")).to_json(), parse_constant=pytest.fail)
    assert (line["loss"], line["gnorm"], line["lr"]) == (None, None, 3e-4)


def write_steps(run, first, last, start=0):
    sink = JsonlSink(run, start)
    for step in range(first, last + 1):
        sink.write(replace(RECORD, step=step, loss=1 / step))
        sink.write(LoadRecord(step=step, counts=[[step]]))
    sink.close()


def test_a_resumed_run_ends_with_the_files_of_an_uninterrupted_one(run, tmp_path):
    other = RunDirectory.create(tmp_path / "other", config_toml="", command="", environment={})
    write_steps(other, 1, 9)
    write_steps(run, 1, 6)
    with run.metrics.open("a") as file:
        file.write('{"record":"step","step":7,"lo')
    write_steps(run, 5, 9, start=4)
    assert run.metrics.read_bytes() == other.metrics.read_bytes()
    assert run.expert_load.read_bytes() == other.expert_load.read_bytes()
    assert not list(run.path.glob("*.tmp"))


def test_a_cut_off_line_of_a_kept_step_is_dropped(run):
    write_steps(run, 1, 2)
    run.metrics.write_bytes(run.metrics.read_bytes()[:-1])
    assert [record["step"] for record in read_jsonl(run.metrics)] == [1]
    JsonlSink(run, 2).close()
    assert [record["step"] for record in read_jsonl(run.metrics)] == [1]


def test_files_that_need_no_change_are_not_replaced(run):
    write_steps(run, 1, 3)
    before = run.metrics.stat().st_ino
    JsonlSink(run, 3).close()
    assert run.metrics.stat().st_ino == before
    JsonlSink(run, 2).close()
    assert run.metrics.stat().st_ino != before


@pytest.mark.parametrize("line", ["{", "[]", '{"loss": 1}', '{"step": "three"}', ""])
def test_a_line_that_is_no_record_is_an_error_with_its_number(run, line):
    write_steps(run, 1, 1)
    run.metrics.write_text(run.metrics.read_text() + line + "\n" + RECORD.to_json() + "\n")
    with pytest.raises(MoeTrainError, match=r"metrics\.jsonl, line 2 is no record of a run"):
        JsonlSink(run, 0)


def test_sinks_are_opened_by_name(run, install):
    (sink,) = open_sinks(["jsonl"], run, 0)
    assert isinstance(sink, JsonlSink)
    sink.close()
    assert open_sinks([], run, 0) == []
    install(
        "acme-sink",
        "[moe_train.sinks]\nacme = acme_sink:SINK\n",
        "from moe_train.plugins import SinkPlugin\n"
        "SINK = SinkPlugin(name='acme', interface_version=1, open=None, available=lambda: 'no account')\n",
    )
    with pytest.raises(PluginError, match="sink 'acme' cannot run here: no account"):
        open_sinks(["acme"], run, 0)


def test_wall_clock_fields_are_fields():
    assert {field.name for field in fields(StepRecord)} > WALL_CLOCK_FIELDS
    assert not WALL_CLOCK_FIELDS & {"loss", "lr", "gnorm", "balance", "dead", "tokens", "step"}


# The table of metrics


def test_every_number_of_a_record_and_every_label_of_the_console_is_explained():
    names = [found.name for found in METRICS]
    assert len(set(names)) == len(names)
    valid = ValidRecord(step=1, valid_loss=1.0, valid_bits_per_byte=1.0)
    recorded = {name for record in (RECORD, valid) for name in json.loads(record.to_json())}
    assert recorded - {"record"} <= set(names)
    assert {f"comm/{field.name}" for field in fields(StepTraffic)} <= recorded
    line = step_line(replace(RECORD, flops_per_second=1e9), 200) + valid_line(valid, 200)
    for label in ("step", "loss", "lr", "gnorm", "balance", "dead", "drop", "tok/s", "eta", "valid", "bits/byte"):
        assert label in line
        assert metric(label).label == label


def test_metrics_are_whole_sentences():
    for found in METRICS:
        assert found.definition.endswith(".")
        assert found.definition[0].isupper()
        assert found.formula
        assert found.good


def test_an_unknown_metric_names_the_others():
    with pytest.raises(MoeTrainError, match="there is no metric 'gnrom'; did you mean 'gnorm'"):
        metric("gnrom")


# The run directory


def test_numbers_of_directories_go_on_after_the_largest(tmp_path):
    for name in ("tiny-2", "tiny-10", "tiny-x", "tiny", "other-99", "tiny--3"):
        (tmp_path / name).mkdir()
    assert next_free_directory(tmp_path, "tiny").name == "tiny-11"
    assert next_free_directory(tmp_path, "tiny").name == "tiny-12"
    assert next_free_directory(tmp_path / "new", "tiny").name == "tiny-1"


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(MoeTrainError, match="cannot be made"):
        RunDirectory.create(tmp_path / "file" / "run", config_toml="", command="", environment={})
    with pytest.raises(MoeTrainError, match="no run directory can be made"):
        next_free_directory(tmp_path / "file", "tiny")


def test_a_damaged_environment_is_named(run):
    run.environment.write_text("{")
    with pytest.raises(MoeTrainError, match=r"env\.json cannot be read"):
        run.read_environment()
    run.summary.write_text("[]")
    with pytest.raises(MoeTrainError, match=r"summary\.json holds no JSON object"):
        run.read_summary()
