"""Sequences of very different lengths over ranks: groups of a fixed size against groups made anew for each microbatch.

    OMP_NUM_THREADS=1 python packages/moe-train/benchmarks/dynamic_context.py

The trainer runs steps of a tiny model on pieces of the shipped text with log-normal lengths (median 256, sigma 1.3,
from 16 to 4,096 tokens) on four ranks, in float32 over gloo, in three ways: every sequence a row of its own that is
padded to the longest of the step (`rows`), sequences packed into rows that all ranks share (`packed`), and dynamic
context parallelism (`dynamic`). All have the same sequences, and so the same losses. A rank has room for 1,024 tokens,
so that the longest sequence needs all four.

`predicted` is the balance that the plan says, with a cost of sharing rows as devices with `EXCHANGE_FLOPS_PER_BYTE`
have it. `measured` is the mean of the ranks' processor times of a step by the largest: ranks that wait use none. `time`
is the wall time of a step, and `processor` the processor time of all ranks, both as ratios to those of `dynamic`; with
fewer cores than ranks the second is the one to read. Medians over the steps but the first.
"""

import argparse
import time
from statistics import median

import numpy as np

from moe_parallel import ParallelLayout, run_distributed
from moe_parallel.context.dynamic import fixed_plan
from moe_train.assemble import assemble, load_data
from moe_train.config.checks import mesh_of
from moe_train.config.load import load_config
from moe_train.data.corpus import load_documents
from moe_train.data.microbatches import FixedCut, next_step, packed_rows
from moe_train.data.source import SequenceSource
from moe_train.step import run_step

RANKS = 4
RANK_TOKENS = 1024
LONGEST = 4096
SETTINGS = (
    "model.num_layers=2",
    "model.model_features=64",
    "model.num_heads=4",
    "model.head_features=32",
    "model.balance.aux=0",
    "model.balance.seq=0.01",
    f"data.sequence_length={LONGEST}",
    "train.global_batch_sequences=32",
    "train.microbatch_sequences=1",
    "train.device=cpu",
    "train.threads=1",
    f"parallel.dynamic_cp_tokens={RANK_TOKENS}",
)


class PackedCut:
    """Packed rows, which all ranks share."""

    def __init__(self, rank, work):
        self.rank, self.work = rank, work

    def rows(self, lengths_N):
        lengths = lengths_N.tolist()
        plan = fixed_plan(lengths, ranks=RANKS, size=RANKS, rank_slots=RANK_TOKENS)
        return packed_rows(plan, self.rank), plan.balance(lengths, self.work)


def cuts_of(num_tokens):
    """Where pieces of log-normal length begin."""
    drawn = np.random.default_rng(0).lognormal(np.log(256), 1.3, size=num_tokens // 64)
    cuts = np.concatenate(([0], np.clip(drawn, 16, LONGEST).astype(np.int64).cumsum()))
    return cuts[cuts < num_tokens]


def measure(how, config, data, tokens, steps):
    """Of each rank, of each step: loss, predicted balance, processor and wall seconds, number of microbatches."""
    layout = ParallelLayout(world=RANKS, cp=RANKS if how == "rows" else 1)

    def on_rank(mesh):
        training = assemble(config, mesh, data)
        size = config.train.global_batch_sequences
        source = SequenceSource(tokens, cuts_of(tokens.size), batch_sequences=size, seed=0, end_of_document=256)
        cut, work = training.cut, training.costs.sequence_work()
        if how == "rows":
            cut = FixedCut(share=training.share, ranks=RANKS, size=1, work=work)
        elif how == "packed":
            cut = PackedCut(mesh.rank("cp", "dp"), work)
        found = []
        for number in range(steps + 1):
            step = next_step(source, cut)
            processor, wall = time.process_time(), time.perf_counter()
            loss = run_step(training, step.microbatches, updates=number, window=None).loss
            processor, wall = time.process_time() - processor, time.perf_counter() - wall
            found.append((loss, step.work_balance, processor, wall, len(step.microbatches)))
        return found

    return run_distributed(layout, on_rank, timeout_s=300, limit_s=1800, **mesh_of(config, layout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    config = load_config("tiny_moe", [], SETTINGS, world=RANKS).config
    data = load_data(config)
    tokens = data.tokenizer.encode_documents(load_documents(config.data.corpus))
    found = {how: measure(how, config, data, tokens, steps) for how in ("rows", "packed", "dynamic")}
    first = {how: ranks[0][0][0] for how, ranks in found.items()}
    print(f"loss of the first step: {', '.join(f'{how} {loss:.6f}' for how, loss in first.items())}")
    times = {
        how: (
            median(ranks[0][step][3] for step in range(1, steps + 1)),
            median(sum(rank[step][2] for rank in ranks) for step in range(1, steps + 1)),
        )
        for how, ranks in found.items()
    }
    print(f"{'':8} {'microbatches':>12} {'predicted':>9} {'measured':>8} {'time':>6} {'processor':>9}")
    for how, ranks in found.items():
        later = range(1, steps + 1)
        busy = [[rank[step][2] for rank in ranks] for step in later]
        measured = median(sum(rank) / RANKS / max(rank) for rank in busy)
        predicted = median(ranks[0][step][1] for step in later)
        wall, processor = (mine / best for mine, best in zip(times[how], times["dynamic"], strict=True))
        number = median(ranks[0][step][4] for step in later)
        print(f"{how:8} {number:12.0f} {predicted:9.2f} {measured:8.2f} {wall:6.2f} {processor:9.2f}")


if __name__ == "__main__":
    main()
