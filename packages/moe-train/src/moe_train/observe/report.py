"""The report of a run: one HTML file with everything in it, readable without a server, a network or a script.

It reads files of the run directory only, so it can be written at any time, for a run in progress too.
"""

import math
import statistics
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from moe_train.config.toml import NONE
from moe_train.observe.html import text
from moe_train.observe.jsonl import read_jsonl
from moe_train.observe.loads import LoadHistory, load_history
from moe_train.observe.memory_section import memory_section
from moe_train.observe.metrics import METRICS, metric
from moe_train.observe.notation import short
from moe_train.observe.svg import Curve, Level, Point, SecondScale, heatmap, line_chart
from moe_train.run_directory import RunDirectory

_FULL_WIDTH = 1140


@dataclass(frozen=True, kw_only=True)
class _Run:
    """What the files of a run say.

    Attributes:
        config: the resolved configuration as nested tables.
        steps, valid: records of metrics.jsonl.
        loads: history of the expert load; None before the first record.
        memory: of a step by class, the latest (`_latest_memory`).
        summary: empty while the run is in progress.
    """

    directory: RunDirectory
    config: dict[str, Any]
    environment: dict[str, Any]
    steps: list[dict[str, Any]]
    valid: list[dict[str, Any]]
    loads: LoadHistory | None
    memory: dict[str, Any] | None
    summary: dict[str, Any]

    @property
    def total_steps(self) -> int:
        return int(self.config["train"]["steps"])

    def points(self, name: str) -> list[Point]:
        """(step, value) of a metric, without values that were not finite."""
        records = self.valid if name.startswith("valid") else self.steps
        return [(record["step"], record[name]) for record in records if record.get(name) is not None]

    def last(self, name: str) -> float | None:
        points = self.points(name)
        return points[-1][1] if points else None


def write_report(run: RunDirectory) -> Path:
    """Write `report.html` of a run and return its path.

    Raises:
        MoeTrainError: the directory holds no readable run.
    """
    records = list(read_jsonl(run.metrics))
    found = _Run(
        directory=run,
        config=tomllib.loads(run.config.read_text(encoding="utf-8")),
        environment=run.read_environment() if run.environment.exists() else {},
        steps=[record for record in records if record["record"] == "step"],
        valid=[record for record in records if record["record"] == "valid"],
        loads=load_history(run.expert_load),
        memory=_latest_memory(list(read_jsonl(run.memory))),
        summary=run.read_summary(),
    )
    temporary = run.report.with_name(f"{run.report.name}.tmp")
    temporary.write_text(_page(found), encoding="utf-8")
    temporary.replace(run.report)
    return run.report


def _latest_memory(records: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The latest record of a step, or before there is one that of building."""
    of_steps = [record for record in records if "build" not in record["phases"]]
    return next(iter(reversed(of_steps or records)), None)


def _page(run: _Run) -> str:
    name = run.directory.path.resolve().name
    style = files("moe_train.observe").joinpath("report.css").read_text(encoding="utf-8")
    parts = [_head(run, name), _tiles(run)]
    if run.steps:
        parts += [_loss(run), _charts(run)]
    if run.loads is not None:
        parts.append(_experts(run, run.loads))
    if run.memory is not None:
        parts.append(memory_section(run.memory))
    parts += [_sample(run), _details(run)]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{text(name)}</title><style>{style}</style></head>\n<body>{''.join(parts)}</body></html>\n"
    )


def _head(run: _Run, name: str) -> str:
    done = run.steps[-1]["step"] if run.steps else 0
    finished = done >= run.total_steps and bool(run.summary)
    status = "finished" if finished else f"step {done} of {run.total_steps}"
    recipe, started = run.environment.get("recipe", "unknown recipe"), run.environment.get("started", "")
    parts = [
        f'<header><h1>{text(name)}<span class="status">{status}</span></h1>',
        f'<p class="muted">{text(recipe)}, started {text(started)}</p>',
    ]
    if not run.steps:
        parts.append('<p class="notice">No step has finished yet.</p>')
    elif not finished:
        parts.append(
            '<p class="notice">This run is not finished. Parameters, entropies of the text and the sample are known at '
            "its end only.</p>"
        )
    return "".join([*parts, "</header>"])


def _tiles(run: _Run) -> str:
    tiles = []
    if (loss := run.last("loss")) is not None:
        tiles.append((f"{loss:.3f}", "training loss, nats per token"))
    if run.valid:
        bits = run.valid[-1]["valid_bits_per_byte"]
        tiles.append(
            (_number(run.valid[-1]["valid_loss"], ".3f"), f"validation loss = {_number(bits, '.3f')} bits per byte")
        )
        if "corpus" in run.summary and run.valid[-1]["valid_loss"] is not None:
            gap = run.valid[-1]["valid_loss"] - run.summary["corpus"]["bigram_nats"]
            tiles.append((f"{gap:+.3f}", "nats from the bigram entropy; below 0 the model uses context"))
    if run.steps:
        tiles.append((short(run.steps[-1]["tokens"]), "tokens seen"))
    if "parameters" in run.summary:
        parameters = run.summary["parameters"]
        tiles.append((short(parameters["total"]), f"parameters, {short(parameters['active'])} active per token"))
    if run.steps:
        # The first step loads kernels and fills caches, so the median tells more than the mean.
        rate = statistics.median(record["tokens_per_second"] for record in run.steps)
        flops = statistics.median(record["flops_per_second"] for record in run.steps)
        tiles.append((short(rate), f"tokens per second, {short(flops * 1e-9)} GFLOP/s (medians)"))
        tiles.append((_gib(max(record["memory_peak_bytes"] for record in run.steps)), "peak memory, GiB"))
        tiles.append((_number(run.last("balance"), ".2f"), f"expert balance, {run.steps[-1]['dead']} experts idle"))
        skipped = sum(record["skipped"] for record in run.steps)
        if skipped:
            tiles.append((str(skipped), '<span class="warn">steps skipped: loss or gradient not finite</span>'))
    return f'<section class="tiles">{"".join(_tile(value, label) for value, label in tiles)}</section>'


def _tile(value: str, label: str) -> str:
    return f'<div class="tile"><b>{value}</b><span>{label}</span></div>'


def _loss(run: _Run) -> str:
    curves = [Curve("training", "one", run.points("loss"))]
    if run.points("valid_loss"):
        curves.append(Curve("validation", "two", run.points("valid_loss"), marked=True))
    corpus = run.summary.get("corpus", {})
    levels = [
        Level(f"{name} entropy", corpus[f"{name}_nats"]) for name in ("unigram", "bigram") if f"{name}_nats" in corpus
    ]
    chart = _chart(
        "Cross-entropy of the next token",
        "Dashed: entropies of the text, what a model reaches that knows how frequent tokens, or pairs of them, are.",
        curves,
        "nats per token",
        levels=levels,
        second=SecondScale("bits per byte", _bits_per_nat(run)),
        width=_FULL_WIDTH,
        height=360,
    )
    return f"<section><h2>Loss</h2>{chart}</section>"


def _bits_per_nat(run: _Run) -> float:
    """Bits per byte of one nat per token: 1 / ln 2 where a token is a byte, else as the validation measured it."""
    ratios = [
        r["valid_bits_per_byte"] / r["valid_loss"] for r in run.valid if r["valid_loss"] and r["valid_bits_per_byte"]
    ]
    return ratios[-1] if ratios else 1 / math.log(2)


def _charts(run: _Run) -> str:
    def one(title: str, name: str, unit: str, scale: float = 1.0, levels: Sequence[Level] = ()) -> str:
        curve = Curve(name, "one", [(step, value * scale) for step, value in run.points(name)])
        return _chart(title, metric(name).definition, [curve], unit, from_zero=True, levels=levels)

    limit = run.config["optim"]["max_grad_norm"]
    clipping = [] if limit == NONE else [Level("clipped above", limit)]

    charts = [
        one("Throughput", "tokens_per_second", "tokens per second"),
        one("Step time", "step_seconds", "milliseconds", 1e3),
        one("Learning rate", "lr", "learning rate"),
        one("Gradient norm", "gnorm", "L2 norm", levels=clipping),
        one("Peak memory", "memory_peak_bytes", "GiB", 2**-30),
    ]
    losses = [("aux_loss", "one"), ("seq_loss", "two"), ("global_loss", "three")]
    used = [Curve(name, css, run.points(name)) for name, css in losses if any(y for _, y in run.points(name))]
    if used:
        definition = "Balance losses without coefficient, mean over layers: 1 is balanced, E / K is collapse."
        charts.append(_chart("Balance losses", definition, used, "loss", levels=[Level("balanced", 1.0)]))
    if any(y for _, y in run.points("z_loss")):
        charts.append(one("Router z-loss", "z_loss", "loss"))
    if any(y for _, y in run.points("mtp_loss")):
        charts.append(one("Tokens beyond the next one", "mtp_loss", "nats per token"))
    return f'<section><h2>Training</h2><div class="charts">{"".join(charts)}</div></section>'


def _chart(title: str, definition: str, curves: Sequence[Curve], unit: str, **options: Any) -> str:
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return f"<figure><h3>{title}</h3><figcaption>No value of this was finite.</figcaption></figure>"
    legend = "".join(f'<span class="{curve.css}"><i></i>{text(curve.name)}</span>' for curve in drawn)
    legend = f'<div class="legend">{legend}</div>' if len(drawn) > 1 else ""
    svg = line_chart(drawn, x_label="step", y_label=unit, **options)
    return f"<figure><h3>{title}</h3><figcaption>{text(definition)}</figcaption>{legend}{svg}</figure>"


def _experts(run: _Run, loads: LoadHistory) -> str:
    mean = [statistics.fmean(counts) or 1.0 for counts in loads.latest]
    relative = [[count / mean[layer] for count in counts] for layer, counts in enumerate(loads.latest)]
    experts = [str(expert) for expert in range(len(loads.latest[0]))]

    def describe(layer: int, expert: int) -> str:
        choices = f"{loads.latest[layer][expert]} choices, {relative[layer][expert]:.2f} of the mean"
        return f"layer {layer}, expert {expert}: {choices}"

    latest = heatmap(
        relative,
        row_label="layer",
        column_label="expert",
        column_names=experts,
        paint=_paint_load,
        describe=describe,
        cell_text=".2f",
    )
    parts = [
        "<section><h2>Experts</h2><figure><h3>Expert load, layer by expert</h3>"
        f"<figcaption>Choices of each expert over the mean of its layer in step {loads.last_step}; 1.00 is balanced. "
        "Layers without experts are not counted; those that predict further tokens come last."
        '</figcaption><div class="legend"><span class="cold"><i class="box"></i>below the mean</span>'
        '<span class="hot"><i class="box"></i>above the mean</span>'
        '<span class="dead"><i class="box"></i>no token</span></div>'
        f"{latest}</figure>",
        _over_time(
            loads,
            loads.balance,
            "Balance over time",
            "largest over mean load",
            "Largest over mean load of each layer, mean over the steps of a column; 1.00 is balanced.",
            "hot",
        ),
    ]
    if any(any(row) for row in loads.dead):
        definition = "Experts of a layer without a token, mean over the steps of a column."
        parts.append(_over_time(loads, loads.dead, "Idle experts over time", "idle experts", definition, "dead"))
    else:
        parts.append('<p class="muted">Every expert received tokens in every step.</p>')
    return "".join([*parts, "</section>"])


def _over_time(
    loads: LoadHistory, values: Sequence[Sequence[float]], title: str, unit: str, definition: str, css: str
) -> str:
    def describe(layer: int, column: int) -> str:
        first, last = loads.spans[column]
        return f"layer {layer}, steps {first} to {last}: {unit} {values[layer][column]:.2f}"

    largest = max(max(row) for row in values)
    least = 1.0 if css == "hot" else 0.0
    chart = heatmap(
        values,
        row_label="layer",
        column_label="step",
        column_names=[str(first) for first, _ in loads.spans],
        paint=lambda value: (css, min(1.0, (value - least) / max(largest - least, 1.0))),
        describe=describe,
    )
    caption = f"{text(definition)} Full colour: {max(largest, least + 1):.2f}."
    return f"<figure><h3>{title}, layer by step</h3><figcaption>{caption}</figcaption>{chart}</figure>"


def _paint_load(relative: float) -> tuple[str, float]:
    """Blue below the mean, red above it, full colour at a factor of four."""
    if relative == 0:
        return "dead", 0.85
    depth = math.log2(relative) / 2
    return ("hot" if depth > 0 else "cold"), min(1.0, abs(depth))


def _sample(run: _Run) -> str:
    sample = run.summary.get("sample")
    if not sample:
        return ""
    note = f", temperature {sample['temperature']}" if "temperature" in sample else ""
    return (
        f'<section><h2>What it writes</h2><div class="card"><p class="muted">Prompt in colour{note}.</p>'
        f'<pre class="sample"><b>{text(sample["prompt"])}</b>{text(sample["text"])}</pre></div></section>'
    )


def _details(run: _Run) -> str:
    config = text(run.directory.config.read_text(encoding="utf-8"))
    versions = run.environment.get("versions", {})
    facts = {
        "command": run.environment.get("command", ""),
        "platform": run.environment.get("platform", ""),
        "accelerators": ", ".join(run.environment.get("accelerators", [])) or "none",
        **{name: version for name, version in versions.items() if version},
    }
    if "corpus" in run.summary:
        facts |= {f"corpus {name}": value for name, value in run.summary["corpus"].items()}
    if "flops_per_token" in run.summary:
        facts |= {f"{name} per token": f"{value:,}" for name, value in run.summary["flops_per_token"].items()}
    rows = "".join(f"<tr><td>{text(name)}</td><td>{text(value)}</td></tr>" for name, value in facts.items())
    meanings = "".join(
        f"<tr><td>{text(m.name)}</td><td>{text(m.definition)}</td><td>{text(m.formula)}</td><td>{text(m.good)}</td></tr>"
        for m in METRICS
    )
    return (
        f"<section><h2>Details</h2><details><summary>Resolved configuration</summary><pre>{config}</pre></details>"
        f"<details><summary>Environment</summary><table>{rows}</table></details>"
        "<details><summary>What the numbers mean</summary><table>"
        f"<tr><th>metric</th><th>definition</th><th>formula</th><th>healthy</th></tr>{meanings}</table></details></section>"
    )


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f}"
