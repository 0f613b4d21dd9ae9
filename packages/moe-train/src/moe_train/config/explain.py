"""Why an option has its value, and in what two configurations differ."""

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_train.config.load import LoadedConfig
from moe_train.config.schema import flatten
from moe_train.config.toml import leaves, to_toml, toml_value
from moe_train.config.tree import TrainConfig
from moe_train.errors import MoeTrainError


@dataclass(frozen=True)
class Difference:
    """One key whose values differ; `missing_*` where a side has no such option."""

    key: str
    left: Any
    right: Any
    missing_left: bool = False
    missing_right: bool = False

    def __str__(self) -> str:
        left = "(no such option)" if self.missing_left else toml_value(self.left)
        right = "(no such option)" if self.missing_right else toml_value(self.right)
        return f"{self.key}: {left} -> {right}"


def why(loaded: LoadedConfig, key: str) -> str:
    """Every layer that set an option, from the lowest to the one that won, which is marked; a section tells all of its.

    Raises:
        MoeTrainError: there is no such option.
    """
    keys = [name for name in {**loaded.history, **loaded.dropped} if name == key or name.startswith(f"{key}.")]
    if not keys:
        sections = sorted({name.partition(".")[0] for name in loaded.history})
        near = [name for name in loaded.history if name.endswith(f".{key.rpartition('.')[2]}")]
        hint = f"did you mean {' or '.join(near)}?" if near else f"sections are {', '.join(sections)}"
        raise MoeTrainError(f"there is no option {key!r}; {hint}")
    return "\n".join(line for name in keys for line in _why(loaded, name))


def diff(left: TrainConfig, right: TrainConfig) -> list[Difference]:
    """All options that differ, in the order of the tree."""
    return _diff(dict(flatten(left)), dict(flatten(right)))


def diff_toml(path: Path, config: TrainConfig) -> list[Difference]:
    """The same between the resolved TOML file of a run and a configuration."""
    saved = tomllib.loads(path.read_text(encoding="utf-8"))
    return _diff(dict(leaves(saved)), dict(leaves(tomllib.loads(to_toml(config)))))


def _diff(left: Mapping[str, Any], right: Mapping[str, Any]) -> list[Difference]:
    return [
        Difference(key, left.get(key), right.get(key), key not in left, key not in right)
        for key in {**left, **right}
        if key not in left or key not in right or left[key] != right[key]
    ]


def _why(loaded: LoadedConfig, key: str) -> Iterator[str]:
    yield key
    for setting in loaded.dropped.get(key, ()):
        kind = f"{key.partition('.')[0]}.kind"
        winner = loaded.history[kind][-1]
        note = f"dropped: {kind} became {toml_value(winner.value)} ({winner.source})"
        yield f"    {toml_value(setting.value)}  {setting.source}, {note}"
    settings = loaded.history.get(key, ())
    for setting in settings:
        mark = "->" if setting is settings[-1] else "  "
        yield f" {mark} {toml_value(setting.value)}  {setting.source}"
