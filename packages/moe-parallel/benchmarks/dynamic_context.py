"""How well static and dynamic context parallelism balance work, predicted for several distributions of lengths.

    python packages/moe-parallel/benchmarks/dynamic_context.py [--seed 0]

Balance is the work of all sequences / (ranks * time), where a microbatch takes as long as its slowest rank: 1 is
perfect. `least` is static context parallelism of the smallest size that holds the longest sequence, `best` that of the
size that balances best; sequences are packed in the order they come. `gain` is dynamic / least. `count` is of
microbatches, static (least) and dynamic. `seconds` is the time of a core to find the plan, and `blocks` which share of
the ranks, over all microbatches, is in blocks of each size.

Work is that of a layer of Qwen3-30B-A3B in training. Nothing here runs a model: what an exchange of keys and values
costs is taken to be the bytes that a rank receives by the bandwidth of its link, none of it hidden behind attention,
in FLOPs that it could have done meanwhile. That is more than it is where a ring hides it.
"""

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Callable

from moe_parallel import MoeParallelError, SequenceWork, fixed_plan, group_sizes, plan_context

# Qwen3-30B-A3B: features, query heads, key/value heads, features of a head, experts, those of a token, their features.
WIDTH, HEADS, KV_HEADS, HEAD, EXPERTS, CHOSEN, EXPERT = 2048, 32, 4, 128, 128, 8, 768
# Parameters of matrices that multiply a token, with 6 FLOPs for each in forward and backward.
PARAMETERS = 2 * WIDTH * (HEADS + KV_HEADS) * HEAD + WIDTH * EXPERTS + CHOSEN * 3 * WIDTH * EXPERT
# Scores and values: 2 products, 2 FLOPs for each feature of all heads, thrice for backward, and half of all pairs.
QUADRATIC = 2 * 2 * HEADS * HEAD * 3 / 2
# Keys and values in bfloat16: forward, again backward, and their gradients.
EXCHANGED_BYTES = 3 * 2 * KV_HEADS * HEAD * 2
# What a rank does of its peak, and receives, in a second.
FLOPS = 400e12
LINKS = {"400 Gb/s network (50 GB/s)": 50e9, "NVLink (450 GB/s)": 450e9}

# Ranks, sequences of a step, token slots of a rank.
SIZES = ((8, 64, 16_384), (64, 1024, 8192), (256, 4096, 8192))
LONGEST = 131_072


def uniform(draw: random.Random) -> float:
    return draw.uniform(64, 16_384)


def log_normal(draw: random.Random) -> float:
    """Median 2,048, sigma 1.2."""
    return draw.lognormvariate(math.log(2048), 1.2)


def bimodal(draw: random.Random) -> float:
    """One of twenty sequences is long."""
    return draw.uniform(512, 2048) if draw.random() < 0.95 else draw.uniform(32_768, 65_536)


def zipf(draw: random.Random) -> float:
    """The share of sequences that are longer falls with about the length."""
    return 256 * draw.paretovariate(0.9)


DISTRIBUTIONS: tuple[Callable[[random.Random], float], ...] = (uniform, log_normal, bimodal, zipf)


def row(lengths: list[int], ranks: int, rank_slots: int, work: SequenceWork) -> str:
    static = {}
    for size in group_sizes(ranks):
        try:
            static[size] = fixed_plan(lengths, ranks=ranks, size=size, rank_slots=rank_slots)
        except MoeParallelError:
            continue
    began = time.process_time()
    plan = plan_context(lengths, ranks=ranks, rank_slots=rank_slots, work=work)
    seconds = time.process_time() - began
    balance = {size: other.balance(lengths, work) for size, other in static.items()}
    least, best, found = min(balance), max(balance, key=balance.__getitem__), plan.balance(lengths, work)
    in_blocks: Counter[int] = Counter()
    for block in plan.blocks():
        in_blocks[block.size] += block.size
    shares = " ".join(f"{size}:{in_blocks[size] / in_blocks.total():.0%}" for size in sorted(in_blocks))
    return (
        f"{least:5} {balance[least]:6.3f} {best:5} {balance[best]:6.3f}  {found:7.3f} {found / balance[least]:5.2f}"
        f" {len(static[least].microbatches):3} {len(plan.microbatches):2} {seconds:8.3f}  {shares}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    for link, bandwidth in LINKS.items():
        shared = EXCHANGED_BYTES * FLOPS / bandwidth
        work = SequenceWork(linear=6 * PARAMETERS, quadratic=QUADRATIC, shared=shared)
        print(f"\n{link}: {shared / work.linear:.3f} of the linear work of a token to receive one")
        print("lengths    ranks sequences slots  least   bal.  best   bal.  dynamic  gain  count  seconds  blocks")
        for distribution in DISTRIBUTIONS:
            for ranks, count, rank_slots in SIZES:
                draw = random.Random(seed)
                lengths = [min(max(round(distribution(draw)), 64), LONGEST) for _ in range(count)]
                found = row(lengths, ranks, rank_slots, work)
                print(f"{distribution.__name__:10} {ranks:5} {count:9} {rank_slots:5}  {found}", flush=True)


if __name__ == "__main__":
    main()
