"""`moe-train report`: write the HTML report of a run."""

from pathlib import Path

from moe_train.cli.arguments import command_parser
from moe_train.run_directory import RunDirectory


def main(arguments: list[str]) -> int:
    from moe_train.observe.report import write_report

    parser = command_parser("report", "Write report.html of a run, finished or in progress: one file, no server.")
    parser.add_argument("run", metavar="RUN", type=Path, help="a run directory")
    options = parser.parse_args(arguments)
    print(write_report(RunDirectory.open(options.run)))
    return 0
