"""What an option of a configuration can take at all: refused where it is written, before anybody reads it as something
else. Imports nothing heavy."""

from collections.abc import Iterator
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from moe_memory.errors import MoeMemoryError
from moe_parallel.problem import Problem

_NAMES = {tuple: "a list", float: "a number", int: "a whole number", bool: "true or false", NoneType: "none"}


def check_words(section: str, config: Any) -> None:
    """Refuse a word that an option does not know, text where it takes none, and what is no word where it takes words.

    Args:
        section: where the options are, as in `memory.recompute`.
        config: a dataclass; numbers are left to its `problems()`.

    Raises:
        MoeMemoryError: with the option, its value and what is legal.
    """
    for name, taken in _options(type(config)).items():
        value = getattr(config, name)
        words = [word for word in taken if isinstance(word, str)]
        others = [kind for kind in taken if not isinstance(kind, str)]
        if value in words or (str in others if isinstance(value, str) else others):
            continue
        legal = ", ".join([*words, *(_NAMES.get(kind, kind.__name__) for kind in others)])
        raise MoeMemoryError(
            str(Problem(key=f"{section}.{name}", value=value, rule="is nothing that it takes", legal=legal))
        )


def _options(config: type[Any]) -> dict[str, tuple[Any, ...]]:
    """By option its legal words, and the types of what else is legal."""
    hints = get_type_hints(config)
    return {field.name: tuple(_alternatives(hints[field.name])) for field in fields(config)}


def _alternatives(annotation: Any) -> Iterator[Any]:
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        for member in get_args(annotation):
            yield from _alternatives(member)
    elif origin is Literal:
        yield from get_args(annotation)
    else:
        yield origin or annotation
