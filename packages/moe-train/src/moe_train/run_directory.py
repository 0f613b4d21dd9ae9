"""`RunDirectory`: the files of one run, and how a directory becomes one. Imports nothing heavy."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_train.errors import MoeTrainError

_COMMAND = """\
#!/bin/sh
# Trains the same resolved configuration again, in a new run directory; arguments are passed on.
# This run was started in {directory}
# as: {command}
exec moe-train run "$(dirname "$0")/config.toml" {nproc}"$@"
"""


@dataclass(frozen=True)
class RunDirectory:
    """Where a run keeps what it knows about itself.

    Attributes:
        path: the directory.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The resolved configuration, TOML. It is written last, so a directory that has it is complete."""
        return self.path / "config.toml"

    @property
    def command(self) -> Path:
        """A script that trains the same configuration again."""
        return self.path / "command.sh"

    @property
    def environment(self) -> Path:
        """Versions, machine, command and seed, JSON."""
        return self.path / "env.json"

    @property
    def metrics(self) -> Path:
        """A record per step and validation, JSON lines."""
        return self.path / "metrics.jsonl"

    @property
    def expert_load(self) -> Path:
        """A record per step with the load of every expert, JSON lines."""
        return self.path / "expert_load.jsonl"

    @property
    def memory(self) -> Path:
        """Records of peak memory by phase and class, JSON lines."""
        return self.path / "memory.jsonl"

    def out_of_memory(self, rank: int) -> Path:
        """What a rank reports that ran out of memory, text."""
        return self.path / f"out_of_memory-rank-{rank:05d}.txt"

    @property
    def summary(self) -> Path:
        """What is known at the end only, JSON."""
        return self.path / "summary.json"

    def log(self, rank: int) -> Path:
        """What a rank logged."""
        return self.path / "log.txt" if rank == 0 else self.path / "logs" / f"rank-{rank:05d}.txt"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def choices(self) -> Path:
        """Folder of recorded router choices."""
        return self.path / "choices"

    @property
    def report(self) -> Path:
        """The report, one HTML file."""
        return self.path / "report.html"

    def read_environment(self) -> dict[str, Any]:
        """The contents of env.json."""
        return _read_json(self.environment)

    def read_summary(self) -> dict[str, Any]:
        """The contents of summary.json; empty while the run is in progress."""
        return _read_json(self.summary) if self.summary.exists() else {}

    @classmethod
    def create(
        cls, path: Path, *, config_toml: str, command: str, environment: Mapping[str, Any], nproc: int = 1
    ) -> "RunDirectory":
        """Prepare an empty or new directory; nothing is ever overwritten.

        Args:
            nproc: ranks that the script starts on its machine.

        Raises:
            MoeTrainError: the directory holds something already, or cannot be made.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            occupied = any(path.iterdir())
        except OSError as error:
            raise MoeTrainError(f"the run directory {path} cannot be made: {error}") from error
        run = cls(path)
        if occupied and run.config.exists():
            raise MoeTrainError(
                f"{path} holds a run already; continue it with --resume, or choose another directory with --run-dir"
            )
        if occupied:
            raise MoeTrainError(f"{path} is not empty and holds no run; choose another directory with --run-dir")
        run.checkpoints.mkdir()
        run.environment.write_text(json.dumps(environment, indent=2) + "\n", encoding="utf-8")
        ranks = f"--nproc {nproc} " if nproc > 1 else ""
        script = _COMMAND.format(directory=Path.cwd(), command=command.replace("\n", " "), nproc=ranks)
        run.command.write_text(script, encoding="utf-8")
        run.command.chmod(0o755)
        run.config.write_text(config_toml, encoding="utf-8")
        return run

    @classmethod
    def open(cls, path: Path) -> "RunDirectory":
        """A directory that holds a run.

        Raises:
            MoeTrainError: it holds none.
        """
        run = cls(path)
        if not run.config.is_file():
            raise MoeTrainError(f"{path} holds no run: there is no {run.config.name} in it")
        return run


def next_free_directory(parent: Path, name: str) -> Path:
    """Make and return `<parent>/<name>-<n>` with the lowest free n above all taken ones.

    Raises:
        MoeTrainError: the directory cannot be made.
    """
    try:
        parent.mkdir(parents=True, exist_ok=True)
        taken = [int(path.name.removeprefix(f"{name}-")) for path in parent.iterdir() if _is_numbered(path.name, name)]
        number = max(taken, default=0) + 1
        while True:
            path = parent / f"{name}-{number}"
            try:
                path.mkdir()
            except FileExistsError:  # Another run was faster.
                number += 1
            else:
                return path
    except OSError as error:
        raise MoeTrainError(f"no run directory can be made in {parent}: {error}") from error


def _is_numbered(directory: str, name: str) -> bool:
    number = directory.removeprefix(f"{name}-")
    return directory.startswith(f"{name}-") and number.isascii() and number.isdecimal()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MoeTrainError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise MoeTrainError(f"{path} holds no JSON object")
    return content
