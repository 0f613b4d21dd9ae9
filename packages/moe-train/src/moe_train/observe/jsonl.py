"""JSON lines: steps and validations in `metrics.jsonl`, expert loads in `expert_load.jsonl`, memory in `memory.jsonl`.

Files only grow, a line at a time, and every line is flushed. A run that resumes forgets the lines of steps that will
come again and a last line that was cut off, so that its files end like those of an uninterrupted run.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moe_train.errors import MoeTrainError
from moe_train.observe.record import LoadRecord, MemoryRecord, Record
from moe_train.plugins import SINK_INTERFACE_VERSION, SinkPlugin
from moe_train.run_directory import RunDirectory


class JsonlSink:
    """Appends records to the files of a run directory."""

    def __init__(self, run: RunDirectory, step: int) -> None:
        for path in (run.metrics, run.expert_load, run.memory):
            _forget_after(path, step)
        self._metrics = run.metrics.open("a", encoding="utf-8")
        self._others = {
            LoadRecord: run.expert_load.open("a", encoding="utf-8"),
            MemoryRecord: run.memory.open("a", encoding="utf-8"),
        }

    def write(self, record: Record) -> None:
        file = self._others.get(type(record), self._metrics)
        file.write(record.to_json() + "\n")
        file.flush()

    def close(self) -> None:
        for file in (self._metrics, *self._others.values()):
            file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file in order; none if it does not exist. A last line that was cut off is left out.

    Raises:
        MoeTrainError: another line is no record.
    """
    for _, record in _records(path):
        yield record


def _records(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Complete lines and what they say."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return  # A record and its line end are one write, so only the end of the last line can be missing.
            try:
                record = json.loads(line)
                int(record["step"])
            except (ValueError, TypeError, KeyError) as error:
                raise MoeTrainError(f"{path}, line {number} is no record of a run: {line[:80]!r}") from error
            yield line, record


def _forget_after(path: Path, step: int) -> None:
    """Keep the records of the first `step` steps. The file is replaced as a whole, and only if something changes."""
    kept = b"".join(line for line, record in _records(path) if record["step"] <= step)
    if not path.exists() or len(kept) == path.stat().st_size:
        return
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(kept)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


SINK = SinkPlugin(name="jsonl", interface_version=SINK_INTERFACE_VERSION, open=JsonlSink)
