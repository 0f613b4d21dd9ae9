"""A rank on fake tensors keeps and takes what a real rank does, and long rows are shared by ranks of tp and cp."""

import pytest
import torch

from moe_kernels.passes import at_most_passes
from moe_memory import LiveBytes, SavedBytes
from moe_parallel import run_distributed
from moe_train.assemble import assemble, load_data
from moe_train.config.checks import layout_of, mesh_of
from moe_train.config.load import load_config
from moe_train.data.microbatches import next_step
from moe_train.fake_world import choices_in_turn, fake_rank
from moe_train.step import run_step
from moe_train.testing import SMALL_DEEPSEEK, short_corpus

# A layer of Qwen3-30B-A3B (arXiv 2505.09388).
QWEN3_LAYER = (
    "model.num_layers=1",
    "model.model_features=2048",
    "model.num_heads=32",
    "model.num_kv_heads=4",
    "model.head_features=128",
    "model.num_experts=128",
    "model.expert_features=768",
    "model.router.top_k=8",
    "train.global_batch_sequences=1",
    "train.microbatch_sequences=1",
    "memory.compute_dtype=bfloat16",
)


def config_for(world, recipe, *settings):
    return load_config(recipe, [], ["train.device=cpu", "train.threads=1", *settings], world=world).config


def measure(training, live):
    """Bytes that live before a step, bytes and number of storages that it keeps for its backward, and its peak."""
    training.engine.synchronize()
    before = live.live_bytes
    live.restart_peak()
    microbatches = next_step(training.data.train, training.cut).microbatches
    choices = choices_in_turn(training, microbatches)
    with SavedBytes(training.model.parameters()) as saved:
        result = run_step(training, microbatches, updates=0, window=None, choices=choices)
    assert not result.skipped
    return before, saved.total_bytes, saved.num_storages, live.peak_bytes


def on_fake(config, world, rank, data):
    with LiveBytes() as live, fake_rank(config, world, rank, data=data) as training:
        return measure(training, live)


SHORT = ("data.sequence_length=512", "train.global_batch_sequences=1", "train.microbatch_sequences=1")
DEGREES = ("parallel.tp=2", "parallel.cp=2", "parallel.ep=4")
# One document for a row: of several, ranks have unequal parts, and so their experts not quite as many tokens.
LATENT = (
    *(*SMALL_DEEPSEEK, "model.num_layers=2", "model.mtp_layers=1"),
    *("parallel.cp_kind=gather", "data.separate_documents=false"),
)
LAYOUTS = {
    "one process": (1, "tiny_long_context", *SHORT),
    "recomputed": (1, "tiny_long_context", *SHORT, "memory.recompute=full"),
    "state in few bits": (
        *(1, "tiny_long_context", *SHORT, "memory.compute_dtype=bfloat16"),
        *("optim.exp_avg_dtype=bfloat16", "optim.exp_avg_sq_dtype=int8"),
    ),
    "over four ranks": (4, "tiny_long_context", *SHORT, *DEGREES, "memory.compute_dtype=bfloat16"),
    "latent attention": (4, "tiny_deepseek_v3", *LATENT, *SHORT, *DEGREES),
}


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fake_rank_keeps_and_takes_what_a_real_one_does(layout):
    """To the byte. Only what gloo holds while it sends may add to a real rank's peak."""
    world, *choice = LAYOUTS[layout]
    config = config_for(world, *choice)
    with short_corpus():
        data = load_data(config)

    def on_rank(mesh):
        with LiveBytes() as live:
            return measure(assemble(config, mesh, data), live)

    place = layout_of(config, world)
    *expected, peak = run_distributed(place, on_rank, timeout_s=60, **mesh_of(config, place))[-1]
    *found, fake_peak = on_fake(config, world, world - 1, data)
    assert found == expected
    assert peak == fake_peak if world == 1 else fake_peak <= peak < 1.1 * fake_peak


def test_131072_tokens_of_a_real_layer_are_kept_in_equal_parts():
    slots = 131072
    rows = f"data.sequence_length={slots}"
    data = load_data(config_for(1, "tiny_qwen3_moe", *QWEN3_LAYER, rows))
    kept = {}
    for tp, cp in ((1, 1), (2, 8)):
        world = tp * cp
        degrees = (f"parallel.tp={tp}", f"parallel.cp={cp}", f"parallel.ep={world}")
        config = config_for(world, "tiny_qwen3_moe", *QWEN3_LAYER, rows, *degrees)
        with at_most_passes(1):
            _, kept[world], _, _ = on_fake(config, world, world - 1, data)
    assert kept[1] > 16e9
    # What both ranks of tp hold alike: the inputs of attention and of the head, gathered, and the rotary tables.
    alike = slots * (2 * 2048 * 2 + 2 * 128 * 4)
    assert kept[16] * 16 == pytest.approx(kept[1] + alike, rel=1e-3)


def test_a_fake_rank_has_no_memory_and_leaves_no_group_behind():
    config = config_for(8, "tiny_moe", "parallel.ep=8", "model.model_features=1024", "model.expert_features=65536")
    with short_corpus():
        data = load_data(config)
    with fake_rank(config, 8, 3, vocab_size=2**20, data=data) as training:
        assert training.groups.rank("ep") == 3
        weights = dict(training.model.named_parameters())
        assert weights["embedding.weight"].shape == (2**20, 1024)
        assert sum(weight.nbytes for weight in weights.values()) > 10 * 2**30
    assert not torch.distributed.is_initialized()
