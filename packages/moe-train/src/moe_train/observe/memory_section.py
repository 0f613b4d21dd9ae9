"""The section of the report about memory: what the peak of every phase consisted of."""

from collections.abc import Mapping
from typing import Any

from moe_train.observe.html import text
from moe_train.observe.metrics import metric

_OWNERS = 12


def memory_section(record: Mapping[str, Any]) -> str:
    """HTML of a record of memory (`MemoryRecord`)."""
    phases, rank = record["phases"], record["rank"]
    classes = [
        kind for kind in next(iter(phases.values()))["classes"] if any(p["classes"][kind] for p in phases.values())
    ]
    most = max(phase["tensor_bytes"] for phase in phases.values()) or 1
    bars = "".join(_bar(name, phase, classes, most) for name, phase in phases.items())
    legend = "".join(
        f'<span class="{kind}" title="{text(metric(f"memory/{kind}").definition)}"><i class="box"></i>{kind}</span>'
        for kind in classes
    )
    when = "while the training was built" if "build" in phases else f"in step {record['step']}"
    whose = f" of rank {rank}, which had most of {len(record['rank_bytes'])}," if len(record["rank_bytes"]) > 1 else ""
    return (
        f"<section><h2>Memory</h2><figure><h3>Tensors at the peak of each phase</h3><figcaption>Those{whose} {when}."
        f' In brackets: {text(record["source"])}, everything included.</figcaption><div class="legend">{legend}</div>'
        f'<table class="memory">{bars}</table>{_owners(phases)}</figure></section>'
    )


def _bar(name: str, phase: Mapping[str, Any], classes: list[str], most: int) -> str:
    parts = "".join(
        f'<i class="{kind}" style="width:{100 * phase["classes"][kind] / most:.2f}%" '
        f'title="{kind} {_gib(phase["classes"][kind])}"></i>'
        for kind in classes
        if phase["classes"][kind]
    )
    numbers = f"{_gib(phase['tensor_bytes'])} [{_gib(phase['process_bytes'])}]"
    return f'<tr><td>{text(name)}</td><td class="bar">{parts}</td><td class="number">{numbers}</td></tr>'


def _owners(phases: Mapping[str, Any]) -> str:
    name, phase = max(phases.items(), key=lambda item: item[1]["tensor_bytes"])
    rows = "".join(
        f'<tr><td class="number">{_gib(size)}</td><td>{text(kind)}</td><td>{text(owner)}</td></tr>'
        for kind, owner, size in phase["owners"][:_OWNERS]
    )
    return (
        f"<details><summary>Largest owners at the peak of {text(name)}</summary>"
        f"<table><tr><th>size</th><th>class</th><th>owner</th></tr>{rows}</table></details>"
    )


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.3f} GiB"
