"""`moe-train explain`: what a metric or an option means."""

import textwrap
from collections.abc import Iterable, Iterator

from moe_train.cli.arguments import command_parser
from moe_train.config.describe import describe
from moe_train.observe.metrics import METRICS, Metric, metric


def main(arguments: list[str]) -> int:
    parser = command_parser(
        "explain",
        "Explain a metric: definition, formula, and what a healthy run shows; or an option of the configuration.",
    )
    help_text = "a metric by name or label, or an option such as memory.recompute; none lists all metrics"
    parser.add_argument("metric", metavar="NAME", nargs="?", help=help_text)
    options = parser.parse_args(arguments)
    if options.metric is None:
        width = max(len(found.name) for found in METRICS)
        for found in METRICS:
            print(f"{found.name:<{width}}  {found.definition}")
    elif "." in options.metric:
        option = describe(options.metric)
        rows = (("", option.text), ("values", option.values), ("default", option.default))
        print("\n".join([options.metric, *_lines(rows)]))
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
    return "\n".join([title, *_lines(rows)])


def _lines(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    indent = " " * 11
    for name, text in rows:
        if text:
            yield textwrap.fill(text, 110, initial_indent=f"  {name:<9}", subsequent_indent=indent)
