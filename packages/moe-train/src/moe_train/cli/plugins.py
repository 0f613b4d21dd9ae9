"""`moe-train plugins`: what is installed."""

import json

from moe_train.cli.arguments import command_parser
from moe_train.cli.inventory import plugin_lines, table


def main(arguments: list[str]) -> int:
    parser = command_parser("plugins", "List installed dispatchers, kernels, model families, recipes and sinks.")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    lines = plugin_lines()
    print(json.dumps([line.to_json() for line in lines], indent=2) if options.json else "\n".join(table(lines)))
    return 0
