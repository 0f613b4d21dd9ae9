"""`moe-train run`: train a recipe in a run directory."""

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from moe_train.cli import EXIT_INTERRUPTED
from moe_train.cli.arguments import Settings, add_settings, command_parser, parse_settings
from moe_train.config.checks import layout_of
from moe_train.config.explain import diff_toml
from moe_train.config.load import load_config
from moe_train.config.toml import to_toml
from moe_train.config.tree import TrainConfig
from moe_train.errors import MoeTrainError
from moe_train.observe.environment import environment, versions
from moe_train.run_directory import RunDirectory, next_free_directory

if TYPE_CHECKING:
    from moe_parallel import Groups, Topology

logger = logging.getLogger("moe_train")

DESCRIPTION = """\
Train a recipe.

    moe-train run tiny_moe
    moe-train run tiny_moe model.num_experts=16 optim.lr=1e-3
    moe-train run tiny_moe --nproc 4 parallel.ep=4
    moe-train run runs/tiny_moe-1/config.toml train.steps=600
    moe-train run tiny_moe --run-dir runs/tiny_moe-1 --resume
    torchrun --nproc-per-node 8 --nnodes 2 ... -m moe_train run RECIPE --run-dir SHARED
"""


def main(arguments: list[str]) -> int:
    parser = command_parser("run", DESCRIPTION)
    add_settings(parser)
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="default: runs/RECIPE-N with the next free N")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --run-dir from its last checkpoint, also on other ranks",
    )
    parser.add_argument("--nproc", type=int, default=1, metavar="N", help="ranks to start on this machine (default 1)")
    options, settings = parse_settings(parser, arguments)
    if options.nproc < 1:
        raise MoeTrainError(f"--nproc {options.nproc}: at least one rank has to run")
    if options.nproc > 1:
        return _launch(options, settings)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    config = load_config(settings.recipe, settings.files, settings.overrides, world=world).config
    from moe_train.launch.worker import rank_groups

    command = shlex.join(["moe-train", "run", *arguments, *_nproc(_ranks_here())])
    with rank_groups(config) as (groups, topology):
        return _train(options, settings, config, groups, topology, command)


def _launch(options: argparse.Namespace, settings: Settings) -> int:
    """Start the ranks; each of them comes to `main` again, without --nproc."""
    if "WORLD_SIZE" in os.environ:
        raise MoeTrainError("--nproc starts ranks, but a launcher has started this process already; leave one out")
    # Mistakes are reported once, before anything is started.
    config = load_config(settings.recipe, settings.files, settings.overrides, world=options.nproc).config
    from moe_train.launch.local import launch

    directory = [] if options.run_dir is None else ["--run-dir", str(options.run_dir)]
    resume = ["--resume"] if options.resume else []
    launch(
        ["run", settings.recipe, *map(str, settings.files), *settings.overrides, *directory, *resume],
        layout_of(config, options.nproc),
    )
    return 0


def _train(
    options: argparse.Namespace,
    settings: Settings,
    config: TrainConfig,
    groups: "Groups",
    topology: "Topology",
    command: str,
) -> int:
    from moe_parallel import gather_json, together
    from moe_train.loop import train

    rank = groups.rank("world")
    path: Path | None = None
    with together():
        if rank == 0:
            resume, directory = options.resume, options.run_dir
            run = _resumable(directory, config) if resume else _new(directory, config, settings, command)
            path = run.path
    # Every rank goes where the first one has decided to.
    run = RunDirectory(Path(gather_json(None if path is None else str(path))[0]))
    if rank == 0:
        print(f"run directory: {run.path}")
    with logging_to(run.log(rank), rank):
        if options.resume and rank == 0:
            _compare_versions(run)
            for difference in diff_toml(run.config, config):
                logger.info("continued with another setting: %s", difference)
        try:
            train(config, run, resume=options.resume, groups=groups, topology=topology)
        except KeyboardInterrupt:
            logger.info("interrupted")
            if rank == 0:
                print(f"interrupted; to continue: {_resume_command(run)}", file=sys.stderr)
            return EXIT_INTERRUPTED
    if rank == 0:
        print(f"report: {run.report}  checkpoints: {run.checkpoints}  metrics: {run.metrics}")
    return 0


def _new(directory: Path | None, config: TrainConfig, settings: Settings, command: str) -> RunDirectory:
    path = next_free_directory(Path("runs"), _run_name(settings.recipe)) if directory is None else directory
    nproc = _ranks_here()
    described = environment(recipe=settings.recipe, command=command, seed=config.train.seed, nproc=nproc)
    return RunDirectory.create(path, config_toml=to_toml(config), command=command, environment=described, nproc=nproc)


def _ranks_here() -> int:
    """Ranks that `--nproc` starts like those of this run; 1 where they are on several machines, which it cannot."""
    world, here = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return world if world == here else 1


def _nproc(ranks: int) -> list[str]:
    return ["--nproc", str(ranks)] if ranks > 1 else []


def _run_name(recipe: str) -> str:
    if not recipe.endswith(".toml"):
        return recipe
    path = Path(recipe)
    return path.resolve().parent.name if path.name == "config.toml" else path.stem


# What may change when a run continues: where and how the same numbers are computed, never which. Between layouts they
# agree up to rounding; bit for bit only where nothing changes.
_MOVABLE = (
    *("parallel.", "comm.", "kernels.", "memory.data_parallel", "memory.reshard", "memory.prefetch_units"),
    *("memory.bucket_mib", "memory.shard_replicas", "memory.recompute", "memory.offload", "optim.offload"),
    *("train.microbatch_sequences", "train.threads", "train.device"),
)


def _resumable(directory: Path | None, config: TrainConfig) -> RunDirectory:
    if directory is None:
        raise MoeTrainError("--resume needs --run-dir: which run is to be continued?")
    run = RunDirectory.open(directory)
    differences = diff_toml(run.config, config)
    other = [difference for difference in differences if not difference.key.startswith(_MOVABLE)]
    if other:
        lines = "".join(f"\n  {difference}" for difference in other)
        raise MoeTrainError(
            f"{directory} was started with another configuration, so continuing it would not be the same run:{lines}\n"
            f"To continue it as it was: {_resume_command(run)}"
        )
    return run


def _resume_command(run: RunDirectory) -> str:
    nproc = _nproc(run.read_environment().get("nproc", 1))
    return shlex.join(["moe-train", "run", str(run.config), "--run-dir", str(run.path), "--resume", *nproc])


def _compare_versions(run: RunDirectory) -> None:
    before, now = run.read_environment().get("versions", {}), versions()
    changed = [f"{name} {before.get(name)} -> {now[name]}" for name in now if before.get(name) != now[name]]
    if changed:
        logger.warning("resumed with other versions, so bits may differ: %s", ", ".join(changed))


@contextmanager
def logging_to(path: Path, rank: int = 0) -> Iterator[None]:
    """Log to a file and to standard error; only here do loggers get handlers."""
    path.parent.mkdir(exist_ok=True)
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    screen = _StandardError()
    speaker = "" if rank == 0 else f"rank {rank}: "
    screen.setFormatter(logging.Formatter(f"{speaker}%(levelname)s: %(message)s"))
    screen.setLevel(logging.WARNING)
    root = logging.getLogger()
    packages = [logging.getLogger(name) for name in _PACKAGES]
    levels = [package.level for package in packages]
    for package in packages:
        package.setLevel(logging.INFO)
    for handler in (file, screen):
        root.addHandler(handler)
    try:
        yield
    except BaseException:
        logger.exception("the run ended with an error")
        raise
    finally:
        for handler in (file, screen):
            root.removeHandler(handler)
            handler.close()
        for package, level in zip(packages, levels, strict=True):
            package.setLevel(level)


class _StandardError(logging.Handler):
    """Writes to the standard error of the moment, which a live display on the terminal replaces."""

    def emit(self, record: logging.LogRecord) -> None:
        # A traceback belongs into the file; the caller of `main` says on the screen what was wrong.
        if record.exc_info is None:
            sys.stderr.write(self.format(record) + "\n")


_PACKAGES = ("moe_parallel", "moe_kernels", "moe_comm", "moe_memory", "moe_train")
