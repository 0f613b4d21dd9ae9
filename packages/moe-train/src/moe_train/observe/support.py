"""What was verified with what: the records of `moe-train verify`, and a matrix of them for the documentation."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from moe_train.errors import MoeTrainError

# Choices of a case whose degree is 1 mean that the axis is not used.
_AXES = ("tp", "cp", "dp", "etp", "ep", "edp")


@dataclass(frozen=True, kw_only=True)
class VerifyRecord:
    """One case of `moe-train verify`.

    Attributes:
        recipe: what was trained.
        world: number of ranks.
        steps: of the run.
        choices: how it was spread, by name, and what of the training matters for that.
        deviations: largest relative difference from one process, by what was compared.
        holds: whether all are within their limits.
    """

    recipe: str
    world: int
    steps: int
    choices: Mapping[str, int | str]
    deviations: Mapping[str, float]
    holds: bool


def append_record(path: Path, record: VerifyRecord) -> None:
    """Add a line to a file of records.

    Raises:
        MoeTrainError: it cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(record)) + "\n")
    except OSError as error:
        raise MoeTrainError(f"the record cannot be added to {path}: {error}") from error


def read_records(path: Path) -> list[VerifyRecord]:
    """Raises:
    MoeTrainError: the file cannot be read, or a line is no record; the message names it.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise MoeTrainError(f"{path} cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(VerifyRecord(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise MoeTrainError(f"{path}, line {number}, is no record of moe-train verify: {error}") from error
    return records


def support_matrix(records: Sequence[VerifyRecord]) -> str:
    """Markdown: how often every two features were verified together, then every case.

    Raises:
        MoeTrainError: there is no record.
    """
    if not records:
        raise MoeTrainError("there is no record to make a matrix of")
    features = list(dict.fromkeys(feature for record in records for feature in _features(record)))
    features.sort(key=_order)
    lines = [
        "| | " + " | ".join(str(number) for number in range(1, len(features) + 1)) + " |",
        "|---" * (len(features) + 1) + "|",
    ]
    for number, one in enumerate(features, 1):
        cells = [_cell(records, one, other) if place < number else "" for place, other in enumerate(features)]
        lines.append(f"| {number} {one} | " + " | ".join(cells) + " |")
    failed = sum(not record.holds for record in records)
    summary = f"{len(records)} cases, {failed} beyond the limits. A cell counts the cases with both features"
    return "\n".join([f"{summary}; the diagonal those with one.", "", *lines, "", *_cases(records), ""])


def _cases(records: Sequence[VerifyRecord]) -> Iterable[str]:
    yield "| recipe | ranks | case | loss 1 | gradient | losses | state | |"
    yield "|---|---|---|---|---|---|---|---|"
    for record in records:
        case = " ".join(f"{name}={value}" for name, value in record.choices.items() if value != 1 or name not in _AXES)
        numbers = " | ".join(f"{value:.1e}" for value in record.deviations.values())
        yield f"| {record.recipe} | {record.world} | {case} | {numbers} | {'ok' if record.holds else 'VIOLATED'} |"


def _features(record: VerifyRecord) -> list[str]:
    """What a case uses: axes with several ranks, and named choices."""
    found = [axis for axis in _AXES if record.choices[axis] != 1]
    found += [f"{name} {value}" for name, value in record.choices.items() if isinstance(value, str)]
    return [*found, record.recipe]


def _order(feature: str) -> tuple[int, str]:
    return (_AXES.index(feature), "") if feature in _AXES else (len(_AXES), feature)


def _cell(records: Sequence[VerifyRecord], one: str, other: str) -> str:
    both = [record for record in records if {one, other} <= set(_features(record))]
    wrong = sum(not record.holds for record in both)
    return f"{len(both)}, {wrong} wrong" if wrong else str(len(both) or "")
