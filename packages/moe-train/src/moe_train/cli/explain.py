"""`moe-train explain`: what a metric means."""

import textwrap

from moe_train.cli.arguments import command_parser
from moe_train.observe.metrics import METRICS, Metric, metric


def main(arguments: list[str]) -> int:
    parser = command_parser("explain", "Explain a metric: definition, formula, and what a healthy run shows.")
    parser.add_argument("metric", metavar="METRIC", nargs="?", help="a name or a label of the console; none lists all")
    options = parser.parse_args(arguments)
    if options.metric is None:
        width = max(len(found.name) for found in METRICS)
        for found in METRICS:
            print(f"{found.name:<{width}}  {found.definition}")
    else:
        print(_page(metric(options.metric)))
        parts = [found.name for found in METRICS if found.name.startswith(f"{options.metric}/")]
        if parts:
            print(f"  more     {', '.join(parts)}")
    return 0


def _page(found: Metric) -> str:
    title = found.name
    if found.label and found.label != found.name:
        title += f" (on the console: {found.label})"
    if found.unit:
        title += f", {found.unit}"
    rows = (("", found.definition), ("formula", found.formula), ("healthy", found.good))
    indent = " " * 11
    return "\n".join(
        [
            title,
            *(textwrap.fill(text, 110, initial_indent=f"  {name:<9}", subsequent_indent=indent) for name, text in rows),
        ]
    )
