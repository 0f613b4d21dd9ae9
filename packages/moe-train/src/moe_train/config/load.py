"""From a recipe, files and overrides to one validated configuration, or to everything that is wrong with it.

    defaults -> recipe -> TOML files in order -> command line

Each upper layer overrides the ones below. A value that is wrong is reported and taken away, so that the value below it
stands in for the remaining checks: three mistakes give three errors, and no error follows from another.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from moe_kernels.registry import PluginError, Registry
from moe_parallel.problem import Problem
from moe_train.config.checks import cross_problems, section_problems
from moe_train.config.error import ConfigError, Fault, Source
from moe_train.config.layers import Layer, Setting, base_layer, file_layer, override_layer
from moe_train.config.schema import Schema
from moe_train.config.toml import toml_value
from moe_train.config.tree import TrainConfig
from moe_train.plugins import MODELS


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A validated configuration and where its values come from.

    Attributes:
        config: the configuration.
        history: every setting of each key from the lowest layer to the one that won.
        dropped: settings without effect, because a higher layer chose another kind of model or dispatcher.
    """

    config: TrainConfig
    history: Mapping[str, tuple[Setting, ...]]
    dropped: Mapping[str, tuple[Setting, ...]]

    @property
    def provenance(self) -> dict[str, Source]:
        """Who set the value of each key."""
        return {key: settings[-1].source for key, settings in self.history.items()}


def load_config(
    recipe: str, files: Sequence[Path] = (), overrides: Sequence[str] = (), *, world: int = 1
) -> LoadedConfig:
    """Load and validate a configuration.

    Args:
        recipe: name of an installed recipe, or path of a TOML file that sets every option, as a run directory has one.
        files: TOML files, later ones over earlier ones.
        overrides: `section.option=value`, also with two dashes in front.
        world: number of ranks that the layout must fit.

    Raises:
        ConfigError: with everything that is wrong.
        PluginError: no such recipe.
        MoeTrainError: a file cannot be read.
    """
    faults: list[Fault] = []
    base = base_layer(recipe, faults)
    layers = [base, *(file_layer(path, faults) for path in files), override_layer(overrides, faults)]
    resolution = _Resolution(layers, faults)
    config = resolution.validate()
    if config is not None:
        config = resolution.check_sections(config)
    if config is not None:
        resolution.report(cross_problems(config, world))
    if faults:
        raise ConfigError(faults)
    assert config is not None
    return LoadedConfig(config=config, history=_frozen(resolution.history), dropped=_frozen(resolution.dropped))


class _Resolution:
    """One load: a stack of settings per key, from which faulty ones are taken away."""

    def __init__(self, layers: Sequence[Layer], faults: list[Fault]) -> None:
        self.faults = faults
        self.dropped: dict[str, list[Setting]] = {}
        narrowed = {
            section: _narrow(section, registry, layers, faults) for section, registry in _union_registries().items()
        }
        self.schema = Schema({section: union.config for section, union in narrowed.items()})
        self.history = {key: self._default(key) for key in self.schema.options}
        for index, layer in enumerate(layers):
            complained: set[str] = set()
            for setting in layer.settings:
                section = setting.key.partition(".")[0]
                if section in narrowed and index in narrowed[section].unreadable:
                    continue
                if section in narrowed and index < narrowed[section].first:
                    self.dropped.setdefault(setting.key, []).append(setting)
                elif setting.key in self.schema.options:
                    self.history[setting.key].append(self._decoded(setting))
                else:
                    self._unknown(setting, complained)
        if layers[0].complete:
            self._require_all(layers[0])

    def validate(self) -> TrainConfig | None:
        """Check the type of every value; None if a value without any legal setting remains."""
        sections = {name: self._section(name) for name in self.schema.sections}
        return None if None in sections.values() else TrainConfig(**sections)

    def check_sections(self, config: TrainConfig) -> TrainConfig | None:
        """Check the rules inside sections; None if breaking values cannot be replaced by those of a lower layer."""
        problems = section_problems(config)
        if not problems:
            return config
        self.report(problems)
        for key in {problem.key for problem in problems}:
            if len(self.history.get(key, ())) > 1:
                self.history[key].pop()
        config_below = self.validate()
        return None if config_below is None or section_problems(config_below) else config_below

    def report(self, problems: Sequence[Problem]) -> None:
        """Add problems to the faults, one fault for each key."""
        for key in dict.fromkeys(problem.key for problem in problems):
            settings = self.history.get(key)
            source = settings[-1].source if settings else Source("default")
            self.faults.append(Fault(_merged([problem for problem in problems if problem.key == key]), source))

    def _section(self, name: str) -> Any:
        from pydantic import TypeAdapter, ValidationError

        adapter = TypeAdapter(self.schema.sections[name])
        while True:
            values: dict[str, Any] = {}
            for key, settings in self.history.items():
                section, *tables, option = key.split(".")
                if section == name and settings:
                    table = values
                    for part in tables:
                        table = table.setdefault(part, {})
                    table[option] = settings[-1].value
            try:
                # JSON is the one strict form in which pydantic takes a list for a tuple.
                return adapter.validate_json(json.dumps(values, default=_as_json), strict=True)
            except ValidationError as error:
                places: dict[str, Sequence[int | str]] = {}
                for details in error.errors():
                    key = self._key(name, details["loc"])
                    places.setdefault(key, details["loc"][key.count(".") :])
                for key, place in places.items():
                    if not self.history[key]:
                        return None
                    self._wrong_type(self.history[key].pop(), place)

    def _key(self, section: str, place: Sequence[int | str]) -> str:
        parts = [section, *map(str, place)]
        keys = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
        return next(key for key in keys if key in self.schema.options)

    def _wrong_type(self, setting: Setting, place: Sequence[int | str]) -> None:
        option = self.schema.options[setting.key]
        near: list[Any] = [*difflib.get_close_matches(str(setting.value), option.words, n=1)]
        if option.takes_list_of_text and isinstance(setting.value, str):
            near.append([setting.value])
        next_step = f"did you mean {toml_value(near[0])}?" if near else ""
        if len(place) > 1 and isinstance(place[0], int):
            next_step = f"look at {place[1]} of entry {place[0] + 1}"
        problem = Problem(key=setting.key, value=setting.value, rule=f"must be {option.kind}", next_step=next_step)
        self.faults.append(Fault(problem, setting.source))

    def _unknown(self, setting: Setting, complained: set[str]) -> None:
        if self.schema.is_table(setting.key):
            rule = "is a section, not an option"
            problem = Problem(key=setting.key, value=setting.value, rule=rule, next_step="set one of the options in it")
            self.faults.append(Fault(problem, setting.source))
            return
        part = self.schema.unknown_part(setting.key)
        if part in complained:
            return
        complained.add(part)
        section = part.partition(".")[0]
        kind = self.history[f"{section}.kind"] if section in _union_registries() else None
        rule = f"there is no such option of {section}.kind = {kind[-1].value!r}" if kind else "there is no such option"
        suggestion = self.schema.suggest(part)
        next_step = f"did you mean {suggestion}?" if suggestion else "`moe-train config show` lists all options"
        self.faults.append(
            Fault(Problem(key=setting.key, value=setting.value, rule=rule, next_step=next_step), setting.source)
        )

    def _require_all(self, base: Layer) -> None:
        missing = [
            key
            for key, settings in self.history.items()
            if all(setting.source.layer == "default" for setting in settings)
        ]
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            rule = f"a file in the place of a recipe sets every option; missing: {', '.join(missing[:5])}{more}"
            next_step = f"to change some options of a recipe, name it first: moe-train run RECIPE {base.source.name}"
            problem = Problem(key=base.source.name, value="", rule=rule, next_step=next_step)
            self.faults.append(Fault(problem))

    def _default(self, key: str) -> list[Setting]:
        default = self.schema.options[key].default
        return [] if default is MISSING else [Setting(key, default, Source("default"))]

    def _decoded(self, setting: Setting) -> Setting:
        option = self.schema.options[setting.key]
        value = (
            setting.text if option.is_text and setting.text and not isinstance(setting.value, str) else setting.value
        )
        return Setting(setting.key, option.decode(value), setting.source, setting.text)


@dataclass(frozen=True, kw_only=True)
class _Narrowed:
    """One union, narrowed: its dataclass, the lowest layer whose options count, and layers that name no legal kind."""

    config: type[Any]
    first: int
    unreadable: frozenset[int]


def _narrow(section: str, registry: Registry[Any], layers: Sequence[Layer], faults: list[Fault]) -> _Narrowed:
    config = type(getattr(TrainConfig(), section))
    kind, first, unreadable = config().kind, 0, set()
    for index, layer in enumerate(layers):
        setting = layer.last(f"{section}.kind")
        if setting is None or setting.value == kind:
            continue
        try:
            config = registry.get(str(setting.value)).config
            kind, first = setting.value, index
        except PluginError as error:
            unreadable.add(index)
            problem = Problem(key=setting.key, value=setting.value, rule=str(error))
            faults.append(Fault(problem, setting.source))
    return _Narrowed(config=config, first=first, unreadable=frozenset(unreadable))


def _union_registries() -> dict[str, Registry[Any]]:
    from moe_comm.registry import DISPATCHERS

    return {"model": MODELS, "comm": DISPATCHERS}


def _merged(problems: Sequence[Problem]) -> Problem:
    """One value may break several rules; it is one mistake."""
    first = problems[0]
    if len(problems) == 1:
        return first
    same = all(problem.legal == first.legal for problem in problems)
    rules = [p.rule if same or not p.legal else f"{p.rule} (legal: {p.legal})" for p in problems]
    return Problem(
        key=first.key,
        value=first.value,
        rule="; ".join(rules),
        legal=first.legal if same else "",
        next_step="; ".join(problem.next_step for problem in problems if problem.next_step),
    )


def _as_json(value: object) -> dict[str, Any]:
    """A table of a list, from a recipe. A date of a file has no form in JSON, and {} is legal for no option."""
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else {}


def _frozen(history: Mapping[str, list[Setting]]) -> dict[str, tuple[Setting, ...]]:
    return {key: tuple(settings) for key, settings in history.items()}
