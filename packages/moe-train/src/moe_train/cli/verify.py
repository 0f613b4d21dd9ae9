"""`moe-train verify`: does the loss depend on the layout?"""

from dataclasses import replace
from pathlib import Path

from moe_parallel.config import ParallelConfig
from moe_train.cli.arguments import add_settings, command_parser, parse_settings
from moe_train.config.load import load_config
from moe_train.config.tree import TrainConfig
from moe_train.errors import MoeTrainError
from moe_train.observe.support import VerifyRecord, append_record

DESCRIPTION = """\
Check that loss, gradients and weights do not depend on how a training is spread over ranks.

    moe-train verify standard --world 4
    moe-train verify tiny_moe --world 8 --limit 4 --steps 20 train.global_batch_sequences=8
    moe-train verify tiny_moe --world 4 comm.kind=hybrid parallel.ranks_per_node=2

Trains a few steps in float64 in one process, and again for every legal layout of N ranks, in processes of this
machine; ways of context and sequence parallelism and data-parallel engines take turns. Prints the largest relative
differences; exits 1 if one is beyond its limit.
`standard` in the place of a recipe takes two, tiny_qwen3_moe and tiny_deepseek_v3, which together have what models here
are made of.
"""

STANDARD = ("tiny_qwen3_moe", "tiny_deepseek_v3")
EXIT_VIOLATION = 1


def main(arguments: list[str]) -> int:
    parser = command_parser("verify", DESCRIPTION)
    add_settings(parser)
    parser.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="steps of each run (default 4)")
    parser.add_argument("--limit", type=int, metavar="N", help="a sample of at most N cases that covers every value")
    parser.add_argument("--record", type=Path, metavar="FILE", help="add the results to a file for `moe-train support`")
    options, settings = parse_settings(parser, arguments)
    for name in ("world", "steps", "limit"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise MoeTrainError(f"--{name} {value} is not at least 1")
    recipes = STANDARD if settings.recipe == "standard" else (settings.recipe,)
    configs = {
        recipe: load_config(recipe, settings.files, settings.overrides, world=options.world).config
        for recipe in recipes
    }
    for config in configs.values():
        given = config.parallel
        if given != replace(ParallelConfig(), timeout_s=given.timeout_s, ranks_per_node=given.ranks_per_node):
            raise MoeTrainError("verify tries every layout itself; leave the degrees of `parallel` out")
    violations = [
        _verify(recipe, config, world=options.world, steps=options.steps, limit=options.limit, record=options.record)
        for recipe, config in configs.items()
    ]
    return EXIT_VIOLATION if any(violations) else 0


def _verify(recipe: str, config: TrainConfig, *, world: int, steps: int, limit: int | None, record: Path | None) -> int:
    """Number of violations."""
    from moe_train.verify import STATE_LIMIT, STEP_LIMIT, cases, sample, verify

    found = cases(config, world)
    chosen = found if limit is None else sample(found, limit)
    print(
        f"{recipe}: {len(chosen)} of {len(found)} cases of {world} ranks, {steps} steps in float64 against one "
        f"process; limits: {STEP_LIMIT:g} in the first step (loss, gradients), {STATE_LIMIT:g} afterwards (loss, state)"
    )
    print(f"{'case':84} {'loss 1':>8} {'gradient':>8} {'losses':>8} {'state':>8}")
    violations = 0
    for deviation in verify(config, chosen, steps=steps, timeout_s=config.parallel.timeout_s):
        gradient, state = deviation.gradient, deviation.state
        numbers = {
            "loss of step 1": deviation.first_loss,
            "gradient of step 1": gradient[0],
            "loss of any step": deviation.loss,
            "state": state[0],
        }
        verdict = "ok" if deviation.holds else f"VIOLATED, worst gradient {gradient[1]}, worst state {state[1]}"
        words = " ".join(f"{number:8.1e}" for number in numbers.values())
        print(f"{deviation.case!s:84} {words}  {verdict}", flush=True)
        violations += not deviation.holds
        if record is not None:
            training = {
                "rows": "of several documents" if config.data.separate_documents else "of one document",
                "loss_norm": config.train.loss_norm,
            }
            append_record(
                record,
                VerifyRecord(
                    recipe=recipe,
                    world=world,
                    steps=steps,
                    choices={**deviation.case.choices, **training},
                    deviations=numbers,
                    holds=deviation.holds,
                ),
            )
    print(
        f"{violations} of {len(chosen)} cases beyond the limits"
        if violations
        else "the loss does not depend on the layout"
    )
    return violations
