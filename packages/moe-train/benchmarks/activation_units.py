"""What each unit of recompute saves in a layer of DeepSeek-V3: real dimensions, the trainer's own code, fake tensors.

    export OMP_NUM_THREADS=1
    python packages/moe-train/benchmarks/activation_units.py    # some minutes; docs/results/activation-units.md
    python packages/moe-train/benchmarks/activation_units.py --ep 8 --pp 4 --vpp 4

One rank of 256 (BF16, PP4 VPP4 EP64, layout `Et*4|(tttt|)*14tmL`, one row of 4,096 tokens) runs the forward and the
backward of its second virtual stage, four layers with experts. `kept` is what autograd keeps of them for the backward
(`moe_memory.SavedBytes`), a layer, in MB of 10^6 bytes, and `saved` the difference to nothing recomputed. A rank of the
pipeline holds several microbatches of several stages at once: `first` and `last` are GB on the first and the last rank
at their fullest, layers in flight times the saving of a layer. `rows` are those of a rank where all experts are loaded
alike.
"""

import argparse
import time

from moe_memory import SavedBytes
from moe_train.assemble import Training, load_data
from moe_train.chunks import build_chunks
from moe_train.config.load import load_config
from moe_train.config.toml import toml_value
from moe_train.data.microbatches import next_step
from moe_train.fake_world import choices_in_turn, fake_rank
from moe_train.scale import StepScale, most_segments

VOCABULARY = 129_280
SLOTS = 4096
LAYERS = 4
MODEL = (
    "memory.compute_dtype=bfloat16",
    "model.num_layers=61",
    "model.model_features=7168",
    "model.num_heads=128",
    "model.num_kv_heads=128",
    "model.head_features=128",
    "model.latent.kv_features=512",
    "model.latent.query_features=1536",
    "model.latent.rotary_features=64",
    "model.latent.value_features=128",
    "model.num_experts=256",
    "model.expert_features=2048",
    "model.dense_layers=[0, 1, 2]",
    "model.dense_features=18432",
    "model.shared_features=2048",
    "model.router.top_k=8",
    "model.router.groups=8",
    "model.router.group_top_k=4",
    "data.separate_documents=false",
    f"data.sequence_length={SLOTS}",
    "train.microbatch_sequences=1",
    "train.device=cpu",
    "train.threads=1",
)
# Units, and what the report publishes for them: GB of a run with PP4 VPP4 EP64 (figures of arXiv 2603.07685).
CHOICES: dict[tuple[str, ...], str] = {
    (): "",
    ("mla_up_proj",): "30.4",
    ("moe_act",): "3.8",
    ("layernorm",): "8.2",
    ("mla_up_proj", "moe_act", "layernorm"): "42.4",
    ("core_attn",): "",
    ("mla_up_proj", "core_attn"): "",
    ("shared_experts",): "",
    ("moe",): "",
    ("full",): "",
}


def kept_bytes(training: Training) -> tuple[int, float]:
    """Bytes that the forward of the second virtual stage keeps, and seconds of its forward and backward."""
    microbatches = next_step(training.data.train, training.cut).microbatches[:1]
    choices = choices_in_turn(training, microbatches)
    depths = training.model.depths
    scale = StepScale.count([microbatches[0].batch], balance_sequences=1, loss_norm="token", depths=depths)

    def weights(index: int, whole):  # type: ignore[no-untyped-def]
        batch = microbatches[index].batch
        return scale.microbatch(
            whole, training.dtype, None, choices.of(batch), row_segments=most_segments(batch), seed=0, step=0
        )

    chunk = build_chunks(training, microbatches, weights)[1].passes
    began = time.perf_counter()
    with SavedBytes(training.model.parameters()) as saved:
        y = chunk.forward(0, None)
    kept = saved.total_bytes
    chunk.backward(0, y, lambda _: None)
    return kept, time.perf_counter() - began


def in_flight(pp: int, vpp: int, rank: int) -> int:
    """Forwards of stages whose backward is to come, at the most, in an interleaved schedule."""
    return 2 * (pp - 1 - rank) + (vpp - 1) * pp + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep", type=int, default=64)
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--vpp", type=int, default=4)
    given = parser.parse_args()
    world = 64 * given.pp
    degrees = [f"parallel.{axis}={getattr(given, axis)}" for axis in ("ep", "pp", "vpp")]
    settings = [*MODEL, *degrees, "parallel.pipeline=Et*4|(tttt|)*14tmL", f"train.global_batch_sequences={world}"]
    first, last = (LAYERS * in_flight(given.pp, given.vpp, rank) for rank in (0, given.pp - 1))
    print(f"layers in flight: {first} on the first rank, {last} on the last\n")
    columns = ("units", "kept, MB", "saved, MB", "share", "first, GB", "last, GB", "published", "seconds")
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
    data = alone = None
    for units, published in CHOICES.items():
        config = load_config("tiny_deepseek_v3", [], [*settings, f"memory.recompute={toml_value(units)}"], world=world)
        data = data or load_data(config.config)
        with fake_rank(config.config, world, vocab_size=VOCABULARY, data=data) as training:
            kept, seconds = kept_bytes(training)
        alone = alone or kept
        saved = (alone - kept) / LAYERS
        cells = [
            ", ".join(units) or "none",
            f"{kept / LAYERS / 1e6:.1f}",
            f"{saved / 1e6:.1f}",
            f"{1 - kept / alone:.1%}",
        ]
        cells += [f"{saved * layers / 1e9:.1f}" for layers in (first, last)]
        print(f"| {' | '.join([*cells, published, f'{seconds:.1f}'])} |", flush=True)


if __name__ == "__main__":
    main()
