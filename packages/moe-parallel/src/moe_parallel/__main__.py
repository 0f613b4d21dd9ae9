"""`python -m moe_parallel show`: print a layout without starting anything."""

import argparse
import sys

from moe_parallel.errors import MoeParallelError
from moe_parallel.layout import ParallelLayout
from moe_parallel.show import describe, describe_rank
from moe_parallel.topology import Topology

EXIT_USER_ERROR = 2


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m moe_parallel", description="Layouts of ranks.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="both views of a layout and where ranks sit", allow_abbrev=False)
    show.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    for axis in ("tp", "cp", "pp", "ep", "etp"):
        show.add_argument(f"--{axis}", type=int, default=1, metavar="N")
    show.add_argument("--ranks-per-node", type=int, default=8, metavar="N", help="consecutive ranks of one machine")
    show.add_argument("--rank", type=int, metavar="R", help="show the groups of one rank instead")
    options = parser.parse_args(argv)
    layout = ParallelLayout(
        world=options.world, tp=options.tp, cp=options.cp, pp=options.pp, ep=options.ep, etp=options.etp
    )
    try:
        layout.check()
        topology = Topology.regular(layout.world, ranks_per_node=min(options.ranks_per_node, layout.world))
        text = describe(layout, topology) if options.rank is None else describe_rank(layout, topology, options.rank)
    except MoeParallelError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER_ERROR
    sys.stdout.write(f"{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
