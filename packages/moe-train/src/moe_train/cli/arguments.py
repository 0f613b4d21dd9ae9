"""Arguments that several sub-commands share: a recipe and what changes it."""

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

_DASHED = re.compile(r"--(?=[\w-]+(?:\.[\w-]+)+)")


@dataclass(frozen=True)
class Settings:
    """A configuration as named on the command line.

    Attributes:
        recipe: name of a recipe or path of a TOML file.
        files: further TOML files.
        overrides: everything else; `load_config` judges it.
    """

    recipe: str
    files: tuple[Path, ...]
    overrides: tuple[str, ...]


def command_parser(name: str, description: str) -> argparse.ArgumentParser:
    """A parser in the house style; prefixes of options are not accepted."""
    from rich_argparse import RawDescriptionRichHelpFormatter

    return argparse.ArgumentParser(
        prog=f"moe-train {name}",
        description=description,
        formatter_class=RawDescriptionRichHelpFormatter,
        allow_abbrev=False,
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Declare the recipe and what may follow it."""
    parser.add_argument("recipe", metavar="RECIPE", help="an installed recipe, or the complete config.toml of a run")
    parser.add_argument(
        "changes",
        metavar="CHANGE",
        nargs="*",
        help="files.toml and section.option=value, in any order; files first, then values, later over earlier",
    )


def parse_settings(parser: argparse.ArgumentParser, arguments: list[str]) -> tuple[argparse.Namespace, Settings]:
    """Parse; options of the command may stand anywhere, and `--section.option=value` is `section.option=value`."""
    found = parser.parse_intermixed_args([_DASHED.sub("", argument, count=1) for argument in arguments])
    is_file = [change.endswith(".toml") and "=" not in change for change in found.changes]
    files = tuple(Path(change) for change, file in zip(found.changes, is_file, strict=True) if file)
    overrides = tuple(change for change, file in zip(found.changes, is_file, strict=True) if not file)
    return found, Settings(found.recipe, files, overrides)
