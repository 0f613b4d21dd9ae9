"""The HTML report: well formed, self-contained, complete, and drawn inside its charts."""

import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import fields
from itertools import pairwise

import pytest

from moe_memory.measure import MEMORY_CLASSES
from moe_train.config.load import load_config
from moe_train.config.toml import to_toml
from moe_train.observe.jsonl import JsonlSink
from moe_train.observe.loads import load_history
from moe_train.observe.record import LoadRecord, MemoryRecord, PhaseMemory, StepRecord, StepTraffic, ValidRecord
from moe_train.observe.report import write_report
from moe_train.observe.svg import Curve, Level, SecondScale, heatmap, line_chart
from moe_train.run_directory import RunDirectory

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = 'the <script>alert("x")</script> & \x00\x1b[1m\x9f\ufffe of ünï 中'


def record(step, **changes):
    values = {
        "step": step,
        "loss": 2 + 3 / step,
        "lr": 1e-3 / step,
        "gnorm": 1 / step,
        "balance": 1.25,
        "dead": 1,
        "num_experts": 6,
        "drop": 0,
        "aux_loss": 1.1,
        "seq_loss": 0.0,
        "global_loss": 0.0,
        "z_loss": 0.0,
        "mtp_loss": 0.0,
        "tokens": 4096 * step,
        "skipped": False,
        "step_seconds": 0.25,
        "tokens_per_second": 16_384.0,
        "flops_per_second": 1e10,
        "work_balance": 1.0,
        "memory_peak_bytes": 3 << 29,
        "eta_seconds": 1.0,
        "comm": StepTraffic(**{field.name: 0 for field in fields(StepTraffic)}),
    }
    return StepRecord(**(values | changes))


SUMMARY = {
    "parameters": {"total": 1_847_680, "active": 668_032},
    "flops_per_token": {"flops_matmul": 4_000_000, "flops_published": 4_100_000},
    "corpus": {"name": "state_of_the_union", "unigram_nats": 3.125, "bigram_nats": 2.375},
    "sample": {"prompt": "The <state>", "text": HOSTILE, "temperature": 0.8},
}


@pytest.fixture
def make(tmp_path):
    """`make(steps, last, summary)`: a run directory with records of the steps up to `last`."""

    def make_run(steps=4, last=4, summary=SUMMARY, **changes):
        config = load_config("tiny_moe", [], [f"train.steps={steps}", "observe.sample_prompt=a <b> & c"]).config
        environment = {"recipe": "tiny_moe", "command": "moe-train run 'a<b'", "versions": {"torch": "9.9"}}
        run = RunDirectory.create(tmp_path / "a & b", config_toml=to_toml(config), command="", environment=environment)
        sink = JsonlSink(run, 0)
        for step in range(1, last + 1):
            sink.write(record(step, **changes))
            sink.write(LoadRecord(step=step, counts=[[8, 4, 0], [4, 4, 4]]))
            if step % 2 == 0:
                sink.write(ValidRecord(step=step, valid_loss=2.5, valid_bits_per_byte=2.5 / math.log(2)))
        sink.close()
        if summary is not None:
            run.summary.write_text(json.dumps(summary))
        return run

    return make_run


def page(run):
    """The report as a tree; it must be well-formed XML."""
    text = write_report(run).read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    return text, ET.fromstring(text)


def visible(tree):
    return " ".join("".join(tree.itertext()).split())


def test_the_report_is_well_formed_and_loads_nothing(make):
    text, tree = page(make())
    assert not list(tree.iter("script"))
    for element in tree.iter():
        assert not {"src", "href", "onload", "onclick"} & set(element.attrib)
    assert re.findall(r"https?://\S+", text.replace("http://www.w3.org/2000/svg", "")) == []
    assert "@import" not in text
    assert "url(" not in text


def test_it_tells_what_an_engineer_wants_to_know(make):
    text = visible(page(make())[1])
    for part in (
        *("finished", "tiny_moe", "2.750training loss", "2.500validation loss = 3.607 bits per byte"),
        *("+0.125nats from the bigram entropy", "16.4ktokens seen", "1.85Mparameters, 668k active"),
        *("16.4ktokens per second, 10 GFLOP/s", "1.50peak memory, GiB", "1.25expert balance, 1 experts idle"),
        *("unigram entropy 3.125", "bigram entropy 2.375", "num_experts = 8", "4,000,000", "torch9.9"),
        *("Gradient norm", "clipped above", "Learning rate", "Throughput", "Balance losses", "balanced 1.000"),
    ):
        assert part in text
    assert "steps skipped" not in text


def test_it_shows_what_the_memory_consisted_of(make):
    run = make()
    assert "Largest owners" not in visible(page(run)[1])
    phases = {}
    for name, gib in (("forward", 2), ("back<ward", 4)):
        classes = dict.fromkeys(MEMORY_CLASSES, 0) | {"parameters": gib << 29, "activations": gib << 29}
        owners = [("activations", f"layers.*.{name}", gib << 29)]
        phases[name] = PhaseMemory(process_bytes=9 << 30, tensor_bytes=gib << 30, classes=classes, owners=owners)
    sink = JsonlSink(run, 4)
    sink.write(MemoryRecord(step=4, source="VmHWM", rank=1, phases=phases, rank_bytes=[1, 4 << 30]))
    sink.close()
    _, tree = page(run)
    text = visible(tree)
    assert "of rank 1, which had most of 2, in step 4" in text
    assert "4.000 GiB [9.000 GiB]" in text
    assert "at the peak of back<ward" in text
    assert "2.000 GiBactivationslayers.*.back<ward" in text
    figure = tree.find(".//table[@class='memory']/..")
    assert [part.text for part in figure.iter("span")] == [None, None]  # parameters and activations alone
    widths = [[part.get("style") for part in row.iter("i")] for row in figure.findall("table[@class='memory']/tr")]
    assert widths == [["width:25.00%"] * 2, ["width:50.00%"] * 2]


def test_a_run_that_resumes_shows_the_latest_step_and_before_it_how_it_was_built(make):
    run = make()
    classes = dict.fromkeys(MEMORY_CLASSES, 0) | {"parameters": 1 << 30}
    phase = PhaseMemory(process_bytes=9 << 30, tensor_bytes=1 << 30, classes=classes, owners=[])
    sink = JsonlSink(run, 4)
    for step, name, shown in (
        (3, "build", "while the training was built"),
        (4, "forward", "in step 4"),
        (4, "build", "in step 4"),
    ):
        sink.write(MemoryRecord(step=step, source="VmHWM", rank=0, phases={name: phase}, rank_bytes=[1 << 30]))
        assert f"Those {shown}." in visible(page(run)[1])
    sink.close()


def test_everything_foreign_is_escaped(make):
    text, tree = page(make())
    assert "<script" not in text
    assert "\x00" not in text
    (bold,) = tree.iter("pre").__next__().iter("b")
    assert bold.text == "The <state>"
    assert bold.tail == 'the <script>alert("x")</script> & \u2400\u241b[1m\ufffd\ufffd of ünï 中'
    assert "a <b> & c" in visible(tree)
    assert tree.find("head/title").text == "a & b"


def test_a_run_in_progress_says_so(make):
    text = visible(page(make(steps=9, last=3, summary=None))[1])
    assert "step 3 of 9" in text
    assert "This run is not finished" in text
    assert "finished yet" not in text
    assert "What it writes" not in text


def test_a_run_before_its_first_step(make):
    text = visible(page(make(last=0, summary=None))[1])
    assert "No step has finished yet" in text
    assert "num_experts = 8" in text


def test_steps_without_a_finite_loss(make):
    text = visible(page(make(loss=float("nan"), gnorm=float("inf"), skipped=True))[1])
    assert "4steps skipped: loss or gradient not finite" in text
    assert "No value of this was finite" in text


def test_clipping_that_is_off_has_no_line(make):
    run = make()
    run.config.write_text(run.config.read_text().replace("max_grad_norm = 1.0", 'max_grad_norm = "none"'))
    assert 'max_grad_norm = "none"' in run.config.read_text()
    assert "clipped above" not in visible(page(run)[1])


def test_a_report_replaces_an_older_one(make):
    run = make(steps=9, last=3, summary=None)
    write_report(run)
    sink = JsonlSink(run, 3)
    sink.write(record(4))
    sink.close()
    assert "step 4 of 9" in visible(page(run)[1])
    assert not list(run.path.glob("*.tmp"))


def test_the_history_of_expert_load(make):
    run = make(last=4)
    history = load_history(run.expert_load)
    assert (history.last_step, history.latest) == (4, [[8, 4, 0], [4, 4, 4]])
    assert history.balance == [[2.0] * 4, [1.0] * 4]
    assert history.dead == [[1.0] * 4, [0.0] * 4]
    assert history.spans == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_a_long_history_is_grouped(make):
    run = make(steps=130, last=0, summary=None)
    sink = JsonlSink(run, 0)
    for step in range(1, 131):
        sink.write(LoadRecord(step=step, counts=[[2, 2] if step % 2 else [4, 0]]))
    sink.close()
    history = load_history(run.expert_load)
    assert history.spans[0] == (1, 3)
    assert history.spans[-1] == (130, 130)
    assert len(history.spans) == 44
    assert history.balance[0][:2] == pytest.approx([4 / 3, 5 / 3])
    assert history.dead[0][-1] == 1.0


# Charts


def numbers(text):
    return [float(number) for number in re.findall(r"-?\d+\.?\d*", text)]


def polyline(tree):
    values = numbers(next(tree.iter(f"{SVG}polyline")).get("points"))
    return list(zip(values[::2], values[1::2], strict=True))


def test_a_curve_is_drawn_where_its_ticks_say():
    chart = line_chart([Curve("loss", "one", [(0, 0.0), (50, 2.5), (100, 10.0)])], x_label="step", y_label="nats")
    tree = ET.fromstring(chart)
    places = {}
    for text in tree.iter(f"{SVG}text"):
        if text.get("class") == "tick end":
            places[float(text.text)] = float(text.get("y")) - 4
    columns = {t.text: float(t.get("x")) for t in tree.iter(f"{SVG}text") if t.get("class") == "tick middle"}
    assert set(places) == {0, 2, 4, 6, 8, 10}
    (x0, y0), (x1, y1), (x2, y2) = polyline(tree)
    assert (y0, y2) == pytest.approx((places[0], places[10]), abs=0.02)
    assert (x0, x2) == pytest.approx((columns["0"], columns["100"]), abs=0.02)
    assert x1 == pytest.approx((x0 + x2) / 2, abs=0.02)
    assert y1 == pytest.approx(y0 + (y2 - y0) / 4, abs=0.02)
    assert y2 < y1 < y0


def test_a_second_scale_agrees_with_the_first():
    chart = line_chart(
        [Curve("loss", "one", [(1, 0.0), (9, 4.0)])],
        x_label="step",
        y_label="nats",
        levels=[Level("entropy", 3.0)],
        second=SecondScale("bits", 2.0),
    )
    tree = ET.fromstring(chart)
    left = {t.text: float(t.get("y")) for t in tree.iter(f"{SVG}text") if t.get("class") == "tick end"}
    right = {t.text: float(t.get("y")) for t in tree.iter(f"{SVG}text") if t.get("class") == "tick"}
    assert right["4"] == pytest.approx(left["2"], abs=0.02)
    (level,) = [line for line in tree.iter(f"{SVG}line") if line.get("class") == "level"]
    assert float(level.get("y1")) == pytest.approx(left["3"] - 4, abs=0.02)


@pytest.mark.parametrize(
    "points",
    [
        [(1, 5.0)],
        [(1, 0.0), (2, 0.0)],
        [(1, 7.0), (2, 7.0)],
        [(1, -3.0), (2, 1e-9)],
        [(1, 1e12), (400_000, 3e12)],
        [(1, 1e-6), (3, 2e-6)],
        [(step, math.sin(step)) for step in range(1, 1000)],
    ],
)
def test_nothing_is_drawn_outside_the_chart(points):
    tree = ET.fromstring(line_chart([Curve("x", "one", points)], x_label="step", y_label="y", from_zero=True))
    _, _, width, height = numbers(tree.get("viewBox"))
    coordinates = []
    for element in tree.iter():
        for name in ("x", "x1", "x2", "cx"):
            coordinates += [(float(element.get(name)), width)] if element.get(name) else []
        for name in ("y", "y1", "y2", "cy"):
            coordinates += [(float(element.get(name)), height)] if element.get(name) else []
        values = numbers(element.get("points") or "")
        coordinates += [(x, width) for x in values[::2]] + [(y, height) for y in values[1::2]]
    assert len(coordinates) > 8
    assert all(0 <= value <= limit for value, limit in coordinates)
    labels = [text.text for text in tree.iter(f"{SVG}text")]
    assert len(labels) >= 4


def test_many_points_become_means_with_their_range():
    points = [(step, float(step % 2)) for step in range(1, 3001)]
    tree = ET.fromstring(line_chart([Curve("x", "one", points)], x_label="step", y_label="y"))
    drawn = polyline(tree)
    assert len(drawn) == 300
    assert len({y for _, y in drawn}) == 1
    band = numbers(next(tree.iter(f"{SVG}polygon")).get("points"))[1::2]
    assert min(band) < drawn[0][1] < max(band)


def test_a_heatmap_has_a_cell_for_every_value():
    values = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    chart = heatmap(
        values,
        row_label="layer",
        column_label="expert",
        column_names=["a", "b", "c"],
        paint=lambda value: ("hot", value / 5),
        describe=lambda row, column: f"{row}<{column}",
        cell_text=".1f",
    )
    tree = ET.fromstring(chart)
    cells = list(tree.iter(f"{SVG}rect"))
    assert [float(cell.get("fill-opacity")) for cell in cells] == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert [cell.find(f"{SVG}title").text for cell in cells] == ["0<0", "0<1", "0<2", "1<0", "1<1", "1<2"]
    lefts, tops = ([float(cell.get(name)) for cell in cells] for name in ("x", "y"))
    assert lefts[:3] == lefts[3:] == sorted(set(lefts))
    assert tops[0] == tops[2] < tops[3] == tops[5]
    _, _, width, height = numbers(tree.get("viewBox"))
    for cell in cells:
        assert float(cell.get("x")) + float(cell.get("width")) <= width
        assert float(cell.get("y")) + float(cell.get("height")) <= height
    texts = [text.text for text in tree.iter(f"{SVG}text")]
    assert texts[:3] == ["0.0", "1.0", "2.0"]
    assert {"a", "b", "c", "layer", "expert"} <= set(texts)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (61, 256), (100, 3)])
def test_heatmaps_of_any_size_stay_legible(rows, columns):
    tree = ET.fromstring(
        heatmap(
            [[1.0] * columns] * rows,
            row_label="layer",
            column_label="expert",
            column_names=[str(column) for column in range(columns)],
            paint=lambda value: ("hot", value),
            describe=lambda row, column: "",
        )
    )
    assert len(list(tree.iter(f"{SVG}rect"))) == rows * columns
    marks = [t for t in tree.iter(f"{SVG}text") if t.get("class") == "tick end"]
    heights = [float(mark.get("y")) for mark in marks]
    assert all(low + 12 <= high for low, high in pairwise(heights))
    assert len([t for t in tree.iter(f"{SVG}text") if t.get("class") == "tick middle"]) <= 16
