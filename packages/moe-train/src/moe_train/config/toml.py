"""Configuration as TOML text.

TOML has no null, so None is written as the string `none`, in files and on the command line alike. An option that is
None is therefore visible in a file, and an upper layer can set it where a lower one had a value.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from moe_train.config.tree import TrainConfig

NONE = "none"


def to_toml(config: TrainConfig) -> str:
    """The whole configuration, every option written out; `load_config` gives the identical configuration back."""
    import tomli_w

    return tomli_w.dumps(_table(config))


def toml_value(value: object) -> str:
    """One value as it would be written in a file."""
    if value is None:
        return NONE
    if is_dataclass(value) and not isinstance(value, type):
        value = _table(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested tables, in order."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _table(section: Any) -> dict[str, Any]:
    return {field.name: _plain(getattr(section, field.name)) for field in fields(section)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return _table(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return NONE if value is None else value
