"""What an option means: its type, its default, and what the docstring of its dataclass says of it."""

import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import MISSING, dataclass
from typing import Any, get_type_hints

from moe_kernels.registry import PluginError
from moe_train.config.schema import Schema
from moe_train.config.toml import toml_value
from moe_train.config.tree import TrainConfig
from moe_train.errors import MoeTrainError
from moe_train.plugins import MODELS


@dataclass(frozen=True, kw_only=True)
class Description:
    """An option, in words.

    Attributes:
        text: what it means.
        values: what is legal.
        default: as it is written; empty where somebody must set it.
    """

    text: str
    values: str
    default: str


def describe(key: str) -> Description:
    """An option by its dotted key, of whatever model or dispatcher has it.

    Raises:
        MoeTrainError: none does.
    """
    suggestion = ""
    for schema in _schemas():
        if key in schema.options:
            option = schema.options[key]
            default = "" if option.default is MISSING else toml_value(option.default)
            return Description(text=_text(schema, key), values=option.kind, default=default)
        suggestion = suggestion or schema.suggest(key)
    hint = f"did you mean {suggestion}?" if suggestion else "`moe-train config show RECIPE` lists all options"
    raise MoeTrainError(f"there is no option {key!r}; {hint}")


def _schemas() -> Iterator[Schema]:
    """That of the defaults, then those of every installed model and dispatcher."""
    from moe_comm.registry import DISPATCHERS

    usual = {section: type(getattr(TrainConfig(), section)) for section in ("model", "comm")}
    yield Schema(usual)
    for section, registry in (("model", MODELS), ("comm", DISPATCHERS)):
        for name in registry.names():
            with suppress(PluginError):  # `moe-train doctor` says what is broken
                yield Schema(usual | {section: registry.get(name).config})


def _text(schema: Schema, key: str) -> str:
    section, *tables, name = key.split(".")
    owner: Any = schema.sections[section]
    for table in tables:
        owner = get_type_hints(owner)[table]
    # What a family adds to another one is described there, and the rest where it comes from.
    return next((text for part in owner.__mro__ if (text := _attributes(part).get(name))), "")


def _attributes(owner: type[Any]) -> dict[str, str]:
    """What a docstring says of each attribute."""
    listed = (inspect.getdoc(owner) or "").partition("Attributes:\n")[2]
    found = re.findall(r"^    (\w+(?:, \w+)*): (.+(?:\n {8}.*)*)", listed, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}
