"""`python -m moe_parallel show` and `schedule`: print a layout or a pipeline schedule without starting anything."""

import argparse
import sys

from moe_parallel.errors import MoeParallelError
from moe_parallel.layout import ParallelLayout
from moe_parallel.pipeline.schedules.table import SCHEDULES
from moe_parallel.pipeline.show import describe_schedule
from moe_parallel.pipeline.simulate import Durations
from moe_parallel.show import describe, describe_rank
from moe_parallel.topology import Topology

EXIT_USER_ERROR = 2


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m moe_parallel", description="Layouts of ranks and schedules of pipelines.", allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="both views of a layout and where ranks sit", allow_abbrev=False)
    show.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    for axis in ("tp", "cp", "pp", "ep", "etp"):
        show.add_argument(f"--{axis}", type=int, default=1, metavar="N")
    show.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="consecutive ranks of one machine")
    show.add_argument("--rank", type=int, metavar="R", help="show the groups of one rank instead")
    schedule = commands.add_parser("schedule", help="who works when in a pipeline", allow_abbrev=False)
    schedule.add_argument("--schedule", required=True, metavar="NAME", help=", ".join(SCHEDULES))
    schedule.add_argument("--pp", type=int, required=True, metavar="N", help="number of pipeline ranks")
    schedule.add_argument("--microbatches", type=int, required=True, metavar="N")
    schedule.add_argument("--vpp", type=int, default=1, metavar="N", help="chunks of a rank")
    for what in ("forward", "input", "weight", "message"):
        default = getattr(Durations, what)
        schedule.add_argument(
            f"--{what}", type=float, default=default, metavar="T", help=f"duration, {default} if absent"
        )
    options = parser.parse_args(argv)
    try:
        text = _schedule(options) if options.command == "schedule" else _show(options)
    except MoeParallelError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER_ERROR
    sys.stdout.write(f"{text}\n")
    return 0


def _show(options: argparse.Namespace) -> str:
    layout = ParallelLayout(
        world=options.world, tp=options.tp, cp=options.cp, pp=options.pp, ep=options.ep, etp=options.etp
    )
    layout.check()
    topology = Topology.regular(layout.world, ranks_per_node=min(options.ranks_per_node, layout.world))
    return describe(layout, topology) if options.rank is None else describe_rank(layout, topology, options.rank)


def _schedule(options: argparse.Namespace) -> str:
    durations = Durations(forward=options.forward, input=options.input, weight=options.weight, message=options.message)
    return describe_schedule(
        options.schedule, pp=options.pp, num_microbatches=options.microbatches, vpp=options.vpp, durations=durations
    )


if __name__ == "__main__":
    sys.exit(main())
