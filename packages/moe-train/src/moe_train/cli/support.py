"""`moe-train support`: what was verified with what, as Markdown."""

from pathlib import Path

from moe_train.cli.arguments import command_parser
from moe_train.observe.support import read_records, support_matrix

DESCRIPTION = """\
Print a matrix of what `moe-train verify --record FILE` has verified together.

    moe-train verify standard --world 4 --record layouts.jsonl
    moe-train support layouts.jsonl > layouts.md
"""


def main(arguments: list[str]) -> int:
    parser = command_parser("support", DESCRIPTION)
    parser.add_argument("records", metavar="FILE", nargs="+", type=Path, help="records of moe-train verify")
    options = parser.parse_args(arguments)
    print(support_matrix([record for path in options.records for record in read_records(path)]), end="")
    return 0
