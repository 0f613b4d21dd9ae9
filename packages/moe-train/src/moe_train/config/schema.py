"""`Schema`: the options that exist, by dotted key, read from the dataclasses of the configuration.

It is made anew for each configuration, because the sections `model` and `comm` depend on their `kind`.
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moe_train.config.toml import NONE, toml_value
from moe_train.config.tree import TrainConfig


@dataclass(frozen=True)
class Option:
    """One option.

    Attributes:
        annotation: its type.
        default: its value when nobody sets it; MISSING if somebody must.
    """

    annotation: Any
    default: Any

    def decode(self, value: Any) -> Any:
        """A value as written, with `none` as None where the option may be None and has no legal word `none`."""
        may_be_none = None in self._alternatives and NONE not in self._alternatives
        return None if may_be_none and value == NONE else value

    @property
    def is_text(self) -> bool:
        """Every value is text, or none."""
        return self._alternatives - {None} == {str}

    @property
    def takes_list_of_text(self) -> bool:
        """A list of text is legal."""
        return tuple[str, ...] in self._alternatives

    @property
    def words(self) -> list[str]:
        """The legal words of an option that takes one of a few."""
        return sorted(word for word in self._alternatives if isinstance(word, str))

    @property
    def kind(self) -> str:
        """What a value must be, in words."""
        return _kind(self.annotation)

    @property
    def _alternatives(self) -> set[Any]:
        return set(_alternatives(self.annotation))


class Schema:
    """The options of a configuration whose unions are narrowed to these classes (section to dataclass).

    Attributes:
        sections: the dataclass of each section, in order.
        options: every option by dotted key, in order.
    """

    def __init__(self, narrowed: Mapping[str, type[Any]]) -> None:
        hints = get_type_hints(TrainConfig)
        self.sections: dict[str, type[Any]] = {
            field.name: narrowed.get(field.name, hints[field.name]) for field in fields(TrainConfig)
        }
        self.options: dict[str, Option] = {}
        for name, section in self.sections.items():
            self.options.update(_options(f"{name}.", section, None))
        self._tables = {key[:end] for key in self.options for end in range(len(key)) if key[end] == "."}

    def is_table(self, key: str) -> bool:
        """The key is a section, or a section inside one."""
        return key in self._tables

    def unknown_part(self, key: str) -> str:
        """The shortest beginning of an unknown key that is neither a section nor an option."""
        parts = key.split(".")
        beginnings = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        return next(part for part in beginnings if part not in self.options and part not in self._tables)

    def suggest(self, key: str) -> str:
        """A known key that was probably meant, or an empty string."""
        parent, _, last = key.rpartition(".")
        known = [*self._tables, *self.options]
        siblings = [other.rpartition(".")[2] for other in known if other.rpartition(".")[0] == parent]
        near = difflib.get_close_matches(last, siblings, n=1)
        if near:
            return f"{parent}.{near[0]}" if parent else near[0]
        elsewhere = [other for other in self.options if other.endswith(f".{last}")]
        if elsewhere:
            return " or ".join(elsewhere)
        return next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.75)), "")


def flatten(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a dataclass instance and the dataclasses inside it, in order."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from flatten(value, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", value


def _options(prefix: str, section: type[Any], defaults: Any) -> Iterator[tuple[str, Option]]:
    """Options of a dataclass; `defaults` is an instance whose values take the place of the class's own defaults."""
    hints = get_type_hints(section)
    for field in fields(section):
        key, annotation = f"{prefix}{field.name}", hints[field.name]
        if defaults is not None:
            default = getattr(defaults, field.name)
        else:
            default = field.default if field.default_factory is MISSING else field.default_factory()
        if isinstance(annotation, type) and is_dataclass(annotation):
            yield from _options(f"{key}.", annotation, None if default is MISSING else default)
        else:
            yield key, Option(annotation, default)


def _alternatives(annotation: Any) -> Iterator[Any]:
    """The members of a union; the values of a Literal; None for the type of None."""
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _alternatives(member)
    elif get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        yield None if annotation is NoneType else annotation


_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", None: NONE}


def _kind(annotation: Any) -> str:
    alternatives = list(_alternatives(annotation))
    if len(alternatives) > 1:
        return " or ".join(map(_kind, alternatives))
    (only,) = alternatives
    if get_origin(only) is tuple:
        return f"a list, each {_kind(get_args(only)[0])}"
    if isinstance(only, str):
        return toml_value(only)
    if is_dataclass(only):
        return f"a table of {', '.join(field.name for field in fields(only))}"
    return _NAMES.get(only, str(only))
