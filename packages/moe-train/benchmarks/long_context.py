"""Long rows over ranks: what a forward keeps for the backward on each rank, and a whole training step.

    export OMP_NUM_THREADS=1
    python packages/moe-train/benchmarks/long_context.py            # rows of 65,536 tokens, minutes per layout
    python packages/moe-train/benchmarks/long_context.py --slots 8192

One row of the recipe `tiny_long_context`, in one process and over tp and cp. What is kept falls as 1 / (tp * cp), and
the loss stays the same; ratios are to one process divided by the ranks.
"""

import argparse
import time

from moe_memory.measure import SavedBytes
from moe_parallel import ParallelLayout, run_distributed
from moe_train.assemble import assemble, load_data
from moe_train.config.checks import mesh_of
from moe_train.config.load import load_config
from moe_train.data.microbatches import next_step
from moe_train.step import run_step

LAYOUTS = ({}, {"cp": 2}, {"tp": 2}, {"tp": 2, "cp": 2}, {"cp": 4, "cp_kind": "gather"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=65536, help="tokens of the row")
    slots = parser.parse_args().slots
    data = None
    alone = None
    print(f"one row of {slots} tokens, float32")
    print(f"{'layout':24} {'loss':>10} {'kept, MB per rank':>18} {'of one / ranks':>15} {'step, s':>8}")
    for parallel in LAYOUTS:
        degrees = {axis: size for axis, size in parallel.items() if axis in ("tp", "cp")}
        world = degrees.get("tp", 1) * degrees.get("cp", 1)
        settings = [
            f"data.sequence_length={slots}",
            "train.device=cpu",
            "train.threads=1",
            *(f"parallel.{key}={v}" for key, v in parallel.items()),
        ]
        config = load_config("tiny_long_context", [], settings, world=world).config
        data = data or load_data(config)

        def on_rank(mesh, config=config, data=data):
            training = assemble(config, mesh, data)
            tokens = next_step(training.data.train, training.cut)
            began = time.perf_counter()
            with SavedBytes(training.model.parameters()) as saved:
                result = run_step(training, tokens.microbatches, updates=0, window=None)
            return result.loss, saved.total_bytes, time.perf_counter() - began

        layout = ParallelLayout(world=world, **degrees)
        ranks = run_distributed(layout, on_rank, timeout_s=600, limit_s=1800, **mesh_of(config, layout))
        kept = max(rank[1] for rank in ranks)
        alone = alone or kept
        words = " ".join(f"{key}={value}" for key, value in parallel.items()) or "one process"
        ratio = kept / (alone / world)
        print(f"{words:24} {ranks[0][0]:10.6f} {kept / 1e6:18.1f} {ratio:15.2f} {ranks[0][2]:8.1f}", flush=True)


if __name__ == "__main__":
    main()
