"""What the memory of one rank of DeepSeek-V3 consists of at its peak: a whole step of the trainer's code, fake tensors.

    export OMP_NUM_THREADS=1
    python packages/moe-train/benchmarks/deepseek_memory.py                     # some minutes; docs/results
    python packages/moe-train/benchmarks/deepseek_memory.py memory.recompute='["mla_up_proj","moe_act","layernorm"]'

One rank of 256 (BF16, PP4 VPP4 EP64, interleaved 1F1B, layout `Et*4|(tttt|)*14tmL`, rows of 4,096 tokens, experts
loaded alike) runs forward, backward, reduction and update. GB are 10^9 bytes. `published` is the table of the report
(arXiv 2603.07685), which does not say of which rank of the pipeline it is; the default is the second, which has neither
embedding nor head. Neither seen are holes between tensors, what kernels take while they run, and the buffers of
collectives; gradients are reduced on a CPU by another collective than on a device, with one more buffer, which the
phase `reduce` has.
"""

import argparse
import time

from activation_units import MODEL, VOCABULARY

from moe_train.config.load import load_config
from moe_train.data.microbatches import next_step
from moe_train.fake_world import choices_in_turn, fake_rank
from moe_train.observe.record import PhaseMemory
from moe_train.step import run_step

WORLD, REPLICAS = 256, 64
LAYOUT = ("parallel.ep=64", "parallel.pp=4", "parallel.vpp=4", "parallel.pipeline=Et*4|(tttt|)*14tmL")
# GB, of the same layout.
PUBLISHED = {
    "weights and gradients": 36.4,
    "master weights and moments": 32.1,
    "activations": 131.0,
    "total": 199.5,
}
OWNERS = 16


def classes_of(phase: PhaseMemory) -> dict[str, float]:
    """GB by the rows of the published table; what dispatchers hold are activations there."""
    found = {name: size / 1e9 for name, size in phase.classes.items()}
    return {
        "weights and gradients": found["parameters"] + found["gradients"],
        "master weights and moments": found["optimizer"],
        "activations": found["activations"] + found["dispatch"] + found["temporary"],
        "total": phase.tensor_bytes / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=1, help="of the pipeline")
    parser.add_argument("--microbatches", type=int, default=8, help="of each rank, a multiple of 4")
    parser.add_argument("overrides", nargs="*", metavar="section.option=value")
    given = parser.parse_args()
    batch = f"train.global_batch_sequences={REPLICAS * given.microbatches}"
    settings = [*MODEL, *LAYOUT, batch, *given.overrides]
    config = load_config("tiny_deepseek_v3", [], settings, world=WORLD).config
    began = time.perf_counter()
    with fake_rank(config, WORLD, given.rank * REPLICAS, vocab_size=VOCABULARY) as training:
        microbatches = next_step(training.data.train, training.cut).microbatches
        choices = choices_in_turn(training, microbatches)
        with training.memory.step():
            run_step(training, microbatches, updates=0, window=None, choices=choices)
    phases = training.memory.phases()
    name, phase = max(phases.items(), key=lambda item: item[1].tensor_bytes)
    print(f"rank {given.rank} of the pipeline, {time.perf_counter() - began:.0f} s; fullest in the phase {name}\n")
    print("| | GB | published |\n|---|---|---|")
    for row, size in classes_of(phase).items():
        print(f"| {row} | {size:.1f} | {PUBLISHED[row]} |")
    print("\n| class | owner | GB |\n|---|---|---|")
    for kind, owner, size in phase.owners[:OWNERS]:
        print(f"| {kind} | {owner} | {size / 1e9:.1f} |")
    print("\n| phase | GB |\n|---|---|")
    for name, phase in phases.items():
        print(f"| {name} | {phase.tensor_bytes / 1e9:.1f} |")


if __name__ == "__main__":
    main()
