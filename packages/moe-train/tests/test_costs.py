"""Parameter counts and FLOPs against published numbers, a real model, and torch's own counter."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe_kernels.config import RouterConfig
from moe_train.assemble import assemble
from moe_train.data.batch import Batch
from moe_train.models.config import DecoderConfig
from moe_train.models.flops import decoder_costs
from moe_train.step import run_step
from moe_train.testing import microbatches, short_corpus, small_config

QWEN3_30B_A3B = DecoderConfig(
    num_layers=48,
    model_features=2048,
    num_heads=32,
    num_kv_heads=4,
    head_features=128,
    num_experts=128,
    expert_features=768,
    router=RouterConfig(top_k=8),
)
MIXTRAL_8X7B = DecoderConfig(
    num_layers=32,
    model_features=4096,
    num_heads=32,
    num_kv_heads=8,
    head_features=128,
    num_experts=8,
    expert_features=14336,
    router=RouterConfig(top_k=2),
    qk_norm="none",
)


def test_r124_published_counts():
    qwen = decoder_costs(QWEN3_30B_A3B, 151_936)
    assert (qwen.parameters, qwen.active_parameters) == (30_532_122_624, 3_353_032_704)
    assert qwen.flops_published(8192) == 37_578_559_488
    assert qwen.flops_matmul(8192) == 37_577_293_824
    mixtral = decoder_costs(MIXTRAL_8X7B, 32_000)
    assert (mixtral.parameters, mixtral.active_parameters) == (46_702_792_704, 12_879_925_248)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("qk_norm", ["none", "head", "all"])
def test_r125_counts_equal_the_built_model(tied, qk_norm):
    overrides = [f"model.tied_embeddings={str(tied).lower()}", f"model.qk_norm={qk_norm}"]
    with short_corpus():
        run = assemble(small_config(*overrides))
    assert sum(parameter.numel() for parameter in run.model.parameters()) == run.costs.parameters
    assert run.costs.active_parameters < run.costs.parameters


def test_flops_matmul_equals_torch_s_counter():
    # float64, so that the experts run as plain matrix products, which the counter sees.
    with short_corpus():
        run = assemble(small_config("memory.compute_dtype=float64"))
    length = 13
    tokens = torch.randint(0, 257, (4, length))
    batch = Batch.from_rows(tokens, tokens, torch.ones_like(tokens, dtype=torch.bool))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run.model(batch.token_BS, batch.sequence_info(), None).logits_BSV.sum().backward()
    assert counter.get_total_flops() == run.costs.flops_matmul(length) * tokens.numel()


def test_flops_of_the_deepseek_model_equal_torch_s_counter():
    """Latent attention, dense layer, shared expert, and two tokens ahead, which training alone computes."""
    options = (
        "memory.compute_dtype=float64",
        "model.latent.value_features=14",
        "train.global_batch_sequences=4",
        "train.microbatch_sequences=4",
        "data.separate_documents=false",  # what nobody sees is not computed, and so not counted
    )
    with short_corpus():
        run = assemble(small_config(*options, recipe="tiny_deepseek_v3"))
    batch = run.data.train.next_batch()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        run_step(run, microbatches(run, batch), updates=0, window=None)
    # The balance loss sums scores by segment in a product; nothing is due to it.
    segments = 4 * 13 * 4 * 8 * 2 * len(run.model.routers())
    assert counter.get_total_flops() == run.costs.flops_matmul(13) * batch.token_BS.numel() + segments
