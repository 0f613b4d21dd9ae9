"""`moe-train config`: show, check and compare configurations."""

import argparse
import sys
from pathlib import Path

from moe_train.cli.arguments import add_settings, command_parser, parse_settings
from moe_train.run_directory import RunDirectory

DESCRIPTION = """\
Look at configurations without training.

    moe-train config show tiny_moe                      every option, as TOML
    moe-train config show tiny_moe a.toml --why optim.lr   which layer set it
    moe-train config check tiny_moe a.toml optim.lr=1e-3   all errors at once
    moe-train config diff tiny_moe runs/tiny_moe-1      recipes, complete files, run directories
"""


def main(arguments: list[str]) -> int:
    actions = {"show": _show, "check": _check, "diff": _diff}
    if arguments and arguments[0] in actions:
        return actions[arguments[0]](arguments[1:])
    parser = command_parser("config", DESCRIPTION)
    parser.add_argument("action", choices=list(actions), metavar="show|check|diff")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="moe-train config ACTION --help tells")
    parser.parse_args(arguments)
    return 0


def _show(arguments: list[str]) -> int:
    from moe_train.config.explain import why
    from moe_train.config.load import load_config
    from moe_train.config.toml import to_toml

    parser = command_parser("config show", "Print the resolved configuration as TOML.")
    add_settings(parser)
    parser.add_argument("--why", metavar="KEY", help="print every layer that set this option, or those of a section")
    options, settings = parse_settings(parser, arguments)
    loaded = load_config(settings.recipe, settings.files, settings.overrides)
    sys.stdout.write(to_toml(loaded.config) if options.why is None else why(loaded, options.why) + "\n")
    return 0


def _check(arguments: list[str]) -> int:
    from moe_train.config.load import load_config

    parser = command_parser("config check", "Validate a configuration; exit status 2 and all errors if it is illegal.")
    add_settings(parser)
    parser.add_argument("--world", type=int, default=1, metavar="N", help="ranks that the layout must fit (default 1)")
    options, settings = parse_settings(parser, arguments)
    loaded = load_config(settings.recipe, settings.files, settings.overrides, world=options.world)
    changed = sum(source.layer in ("file", "command line") for source in loaded.provenance.values())
    ranks = f"{options.world} rank{'s' if options.world > 1 else ''}"
    print(f"legal on {ranks}: {settings.recipe}, {changed} option{'' if changed == 1 else 's'} set on top of it")
    return 0


def _diff(arguments: list[str]) -> int:
    from moe_train.config.explain import diff
    from moe_train.config.load import load_config

    parser = command_parser("config diff", "Print the options in which two configurations differ: A -> B.")
    for side in ("A", "B"):
        parser.add_argument(side, help="a recipe, a complete TOML file or a run directory")
    options = parser.parse_args(arguments)
    left, right = (load_config(_recipe(name)).config for name in (options.A, options.B))
    differences = diff(left, right)
    for difference in differences:
        print(difference)
    if not differences:
        print("no difference")
    return 0


def _recipe(name: str) -> str:
    return str(RunDirectory.open(Path(name)).config) if Path(name).is_dir() else name
