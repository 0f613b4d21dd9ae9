"""Very long rows with real dimensions: what one rank keeps and takes, by the trainer's own code on fake tensors.

    export OMP_NUM_THREADS=1
    python packages/moe-train/benchmarks/long_context_fake.py       # 131,072 and 262,144 tokens: a quarter of an hour
    python packages/moe-train/benchmarks/long_context_fake.py --slots 131072 --tp 1 2 --cp 1 16 -- memory.recompute=full

Two layers of Qwen3-30B-A3B (arXiv 2505.09388) with its embedding and head, in bfloat16; one row, the experts spread
over all ranks, and as many tokens for each. `kept` is what autograd keeps for the backward, of which `logits` the
logits, and its ratio is to one rank divided by the ranks. `state` are weights, gradients and optimizer, and `peak` what
a step takes above them at most. The numbers are those of the rank in the middle of the world.
"""

import argparse
import time

from moe_memory import LiveBytes, SavedBytes
from moe_parallel import vocabulary
from moe_parallel.plan import part_of
from moe_train.assemble import load_data
from moe_train.config.load import load_config
from moe_train.data.microbatches import next_step
from moe_train.fake_world import choices_in_turn, fake_rank
from moe_train.step import run_step

VOCABULARY = 151_936
MODEL = (
    "memory.compute_dtype=bfloat16",
    "model.num_layers=2",
    "model.model_features=2048",
    "model.num_heads=32",
    "model.num_kv_heads=4",
    "model.head_features=128",
    "model.num_experts=128",
    "model.expert_features=768",
    "model.router.top_k=8",
    "model.rope_base=1e6",
    "train.global_batch_sequences=1",
    "train.microbatch_sequences=1",
    "train.device=cpu",
    "train.threads=1",
)
GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, nargs="+", default=[131072, 262144], help="tokens of the row")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--cp", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("settings", nargs="*", help="further settings, as memory.recompute=full")
    given = parser.parse_args()
    columns = ("tokens", "tp", "cp", "kept, GB", "ratio", "logits", "state", "peak", "seconds")
    print(" ".join(f"{column:>8}" for column in columns))
    for slots in given.slots:
        data = alone = None
        for tp, cp in ((tp, cp) for tp in given.tp for cp in given.cp):
            world = tp * cp
            degrees = (f"parallel.tp={tp}", f"parallel.cp={cp}", f"parallel.ep={world}")
            settings = [*MODEL, f"data.sequence_length={slots}", *degrees, *given.settings]
            config = load_config("tiny_qwen3_moe", [], settings, world=world).config
            data = data or load_data(config)
            logits = slots // cp * part_of(VOCABULARY, tp, 0)[1] * 2
            # As many passes as `fake_rank` has elsewhere; this module counts its own.
            vocabulary._PASS_ELEMENTS = logits // 2 // 32
            began = time.perf_counter()
            with (
                LiveBytes() as live,
                fake_rank(config, world, world // 2, vocab_size=VOCABULARY, data=data) as training,
                SavedBytes(training.model.parameters()) as saved,
            ):
                state = live.live_bytes
                live.restart_peak()
                microbatches = next_step(training.data.train, training.cut).microbatches
                choices = choices_in_turn(training, microbatches)
                run_step(training, microbatches, updates=0, window=None, choices=choices)
                kept, peak = saved.total_bytes, live.peak_bytes - state
            alone = alone or kept * world
            ratio, seconds = kept * world / alone, time.perf_counter() - began
            cells = [f"{kept / GB:.3f}", f"{ratio:.3f}", *(f"{x / GB:.2f}" for x in (logits, state, peak))]
            row = [slots, tp, cp, *cells, round(seconds)]
            print(" ".join(f"{cell:>8}" for cell in row), flush=True)


if __name__ == "__main__":
    main()
