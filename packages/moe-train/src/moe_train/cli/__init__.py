"""The command line. Each sub-command is one module, imported when it is called, so that `--help` is immediate."""

import argparse
import os
import sys
from importlib import import_module

from moe_parallel.errors import described

# Name, module, what it does. A module has `main(arguments: list[str]) -> int`.
COMMANDS = {
    "run": ("run", "train a recipe"),
    "config": ("config", "show, check and compare configurations; say who set a value"),
    "verify": ("verify", "check that loss, gradients and weights do not depend on the layout of ranks"),
    "support": ("support", "what was verified with what, as a matrix"),
    "report": ("report", "write the HTML report of a run"),
    "explain": ("explain", "what a metric or an option means, how it is computed, what is healthy"),
    "doctor": ("doctor", "what this installation can do here, and why not the rest"),
    "plugins": ("plugins", "list installed dispatchers, kernels, models, recipes and sinks"),
}
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


def main(argv: list[str] | None = None) -> int:
    """Run a sub-command and return its exit status.

    An error that the user can mend is one message on standard error and status 2; any other is a bug and keeps its
    traceback.
    """
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] not in COMMANDS:
        parser = _parser()
        parser.parse_args(arguments)
        parser.print_help(sys.stderr)
        return EXIT_USER_ERROR
    command = import_module(f"{__name__}.{COMMANDS[arguments[0]][0]}")
    try:
        status: int = command.main(arguments[1:])
        sys.stdout.flush()
    except ValueError as error:
        if not isinstance(error, _user_errors()):
            raise
        print(f"moe-train: {described(error)}", file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("moe-train: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # The reader of the output has gone, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    from rich_argparse import RichHelpFormatter

    from moe_train._version import __version__

    description = "Train Mixture-of-Experts models."
    parser = argparse.ArgumentParser(prog="moe-train", description=description, formatter_class=RichHelpFormatter)
    parser.add_argument("--version", action="version", version=f"moe-train {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=False)
    for name, (_, summary) in COMMANDS.items():
        commands.add_parser(name, help=summary, add_help=False)
    return parser


def _user_errors() -> tuple[type[ValueError], ...]:
    from moe_comm.errors import MoeCommError
    from moe_kernels.errors import MoeKernelsError
    from moe_memory.errors import MoeMemoryError
    from moe_parallel.errors import MoeParallelError
    from moe_train.errors import MoeTrainError

    return MoeTrainError, MoeCommError, MoeMemoryError, MoeKernelsError, MoeParallelError
