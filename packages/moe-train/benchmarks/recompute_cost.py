"""Time that each unit of recompute costs for the bytes that it saves, and what its calls cost on the host.

    export OMP_NUM_THREADS=1
    python packages/moe-train/benchmarks/recompute_cost.py          # a minute or two

Two layers with experts of a small DeepSeek-V3 (256 features, 8 experts), float32, 512 tokens a step. `saved` is what
autograd keeps less for the backward of a step, and its share; `time` is the ratio to the time of nothing recomputed.
Variants take turns in every round, so that other work on the machine meets all of them, and the ratio is the median of
those of each round. `host` is the same with eight tokens and 24 features, where computing takes next to nothing:
microseconds that a layer takes more in forward and backward, what is computed again included.
"""

import argparse
import time
from statistics import median

from moe_memory import SavedBytes
from moe_train.assemble import Training, assemble
from moe_train.config.load import load_config
from moe_train.config.toml import toml_value
from moe_train.data.microbatches import next_step
from moe_train.step import run_step
from moe_train.testing import SMALL_DEEPSEEK, short_corpus

LAYERS = 2
COMMON = (
    "memory.compute_dtype=float32",
    f"model.num_layers={LAYERS}",
    "model.dense_layers=[]",
    "model.dense_features=none",
    "model.mtp_layers=0",
    "data.separate_documents=false",
    "train.threads=1",
)
WIDE = (
    "model.model_features=256",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.head_features=64",
    "model.latent.kv_features=64",
    "model.latent.query_features=96",
    "model.latent.rotary_features=32",
    "model.latent.value_features=64",
    "model.num_experts=8",
    "model.expert_features=96",
    "model.shared_features=96",
    "model.router.top_k=4",
    "data.sequence_length=256",
    "train.global_batch_sequences=2",
    "train.microbatch_sequences=2",
)
NARROW = (*SMALL_DEEPSEEK, "data.sequence_length=8", "train.global_batch_sequences=1", "train.microbatch_sequences=1")
# Recomputed, offloaded.
CHOICES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "none": ((), ()),
    "layernorm": (("layernorm",), ()),
    "mla_up_proj": (("mla_up_proj",), ()),
    "moe_act": (("moe_act",), ()),
    "these three": (("layernorm", "mla_up_proj", "moe_act"), ()),
    "core_attn": (("core_attn",), ()),
    "shared_experts": (("shared_experts",), ()),
    "moe": (("moe",), ()),
    "full": (("full",), ()),
    "offload of moe_act": ((), ("moe_act",)),
}


def build(sizes: tuple[str, ...], recompute: tuple[str, ...], offload: tuple[str, ...]) -> Training:
    units = (f"memory.recompute={toml_value(recompute)}", f"memory.offload={toml_value(offload)}")
    settings = [*sizes, *COMMON, *units, "memory.offload_min_elements=1", "train.valid_sequences=1"]
    with short_corpus():
        return assemble(load_config("tiny_deepseek_v3", [], settings).config)


def seconds(training: Training, steps: int) -> float:
    """Of a step, on average."""
    microbatches = next_step(training.data.train, training.cut).microbatches
    began = time.perf_counter()
    for _ in range(steps):
        run_step(training, microbatches, updates=0, window=None)
    return (time.perf_counter() - began) / steps


def kept_bytes(training: Training) -> int:
    with SavedBytes(training.model.parameters()) as saved:
        seconds(training, 1)
    return saved.total_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    wide = {name: build(WIDE, *choice) for name, choice in CHOICES.items()}
    kept = {name: kept_bytes(training) for name, training in wide.items()}
    times = [{name: seconds(training, 1) for name, training in wide.items()} for _ in range(given.rounds)]
    narrow = {name: build(NARROW, *choice) for name, choice in CHOICES.items()}
    for training in narrow.values():
        seconds(training, 3)
    host = [{name: seconds(training, 3) for name, training in narrow.items()} for _ in range(given.rounds)]
    print("| units | saved, MB | saved | time | host, us a layer |\n|---|---|---|---|---|")
    for name in CHOICES:
        saved = kept["none"] - kept[name]
        ratio = median(turn[name] / turn["none"] for turn in times)
        more = median(turn[name] - turn["none"] for turn in host) / LAYERS
        print(f"| {name} | {saved / 1e6:.1f} | {saved / kept['none']:.1%} | {ratio:.3f} | {more * 1e6:.0f} |")


if __name__ == "__main__":
    main()
