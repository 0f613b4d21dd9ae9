"""Expert load over a run: the last step in full, and per layer how balance and idle experts developed."""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from moe_train.observe.jsonl import read_jsonl

_COLUMNS = 60


@dataclass(frozen=True, kw_only=True)
class LoadHistory:
    """The load of all layers over the steps of a run, which are grouped into at most 60 spans.

    Attributes:
        last_step: step of `latest`.
        latest: choices by layer and expert.
        spans: (first, last) step of each span.
        balance: by layer and span, largest over mean load, averaged over the steps.
        dead: by layer and span, experts without a token, averaged over the steps.
    """

    last_step: int
    latest: list[list[int]]
    spans: list[tuple[int, int]]
    balance: list[list[float]]
    dead: list[list[float]]


def load_history(path: Path) -> LoadHistory | None:
    """Read `expert_load.jsonl`; None if it holds no record."""
    steps: list[int] = []
    balance: list[list[float]] = []
    dead: list[list[int]] = []
    latest: list[list[int]] = []
    for record in read_jsonl(path):
        latest = record["counts"]
        steps.append(record["step"])
        balance.append([max(counts) * len(counts) / (sum(counts) or 1) for counts in latest])
        dead.append([counts.count(0) for counts in latest])
    if not steps:
        return None
    size = math.ceil(len(steps) / _COLUMNS)
    cuts = [slice(start, start + size) for start in range(0, len(steps), size)]
    layers = range(len(latest))
    return LoadHistory(
        last_step=steps[-1],
        latest=latest,
        spans=[(steps[cut][0], steps[cut][-1]) for cut in cuts],
        balance=[[fmean(values[layer] for values in balance[cut]) for cut in cuts] for layer in layers],
        dead=[[fmean(values[layer] for values in dead[cut]) for cut in cuts] for layer in layers],
    )
