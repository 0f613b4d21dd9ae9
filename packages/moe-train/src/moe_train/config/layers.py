"""Layers: what a recipe, a TOML file and the command line say, before anybody judges it."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_parallel.problem import Problem
from moe_train.config.error import Fault, Source
from moe_train.config.schema import flatten
from moe_train.config.toml import leaves
from moe_train.errors import MoeTrainError
from moe_train.plugins import RECIPES

_OVERRIDE = re.compile(r"(?:--)?(?P<key>[\w-]+(?:\.[\w-]+)*)=(?P<text>.*)", re.DOTALL)


@dataclass(frozen=True)
class Setting:
    """One value that somebody set.

    Attributes:
        key: dotted.
        value: as TOML reads it.
        source: who set it.
        text: as written on the command line, before it was read as TOML.
    """

    key: str
    value: Any
    source: Source
    text: str | None = None


@dataclass(frozen=True)
class Layer:
    """Settings of one source, in their order.

    Attributes:
        complete: the layer is the base and must set every option.
    """

    source: Source
    settings: tuple[Setting, ...]
    complete: bool = False

    def last(self, key: str) -> Setting | None:
        """The last setting of a key, or None."""
        return next((setting for setting in reversed(self.settings) if setting.key == key), None)


def base_layer(recipe: str, faults: list[Fault]) -> Layer:
    """The lowest layer: an installed recipe by name, or a TOML file that sets every option.

    Raises:
        PluginError: no such recipe; the message has the installed ones.
    """
    if recipe.endswith(".toml"):
        layer = file_layer(Path(recipe), faults)
        return Layer(layer.source, layer.settings, complete=bool(layer.settings))
    source = Source("recipe", recipe)
    config = RECIPES.get(recipe).build()
    return Layer(source, tuple(Setting(key, value, source) for key, value in flatten(config)))


def file_layer(path: Path, faults: list[Fault]) -> Layer:
    """A TOML file; one that is no TOML is a fault with its line, and an empty layer.

    Raises:
        MoeTrainError: the file cannot be read.
    """
    source = Source("file", str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MoeTrainError(f"the configuration file {path} cannot be read: {error}") from error
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        faults.append(Fault(_syntax_problem(path, text, str(error))))
        return Layer(source, ())
    return Layer(source, tuple(Setting(key, value, source) for key, value in leaves(document)))


def override_layer(overrides: Sequence[str], faults: list[Fault]) -> Layer:
    """All overrides of the command line as one layer; a later one of the same key wins.

    A value is read as TOML; what is no TOML is text, so that words need no quotes.
    """
    source = Source("command line")
    settings = []
    for override in overrides:
        match = _OVERRIDE.fullmatch(override)
        if match is None:
            rule, example = "is no setting", "write section.option=value, for example optim.lr=1e-3"
            faults.append(Fault(Problem(key=f"{source}", value=override, rule=rule, next_step=example)))
            continue
        key, text = match["key"], match["text"]
        value = _read_value(text)
        found = leaves({key: value}) if isinstance(value, dict) else [(key, value)]
        settings += [Setting(name, item, source, text) for name, item in found]
    return Layer(source, tuple(settings))


def _read_value(text: str) -> Any:
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return document["value"] if len(document) == 1 else text


def _syntax_problem(path: Path, text: str, message: str) -> Problem:
    place = re.search(r"\(at (line (\d+), column \d+)\)", message)
    if place is None:
        return Problem(key=f"{path}", value="", rule=f"is no TOML: {message}")
    line = text.splitlines()[int(place[2]) - 1].strip()
    return Problem(key=f"{path}, {place[1]}", value=line, rule=f"is no TOML: {message[: place.start()].rstrip()}")
