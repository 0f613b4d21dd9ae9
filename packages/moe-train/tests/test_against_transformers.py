"""The decoder equals Qwen3-MoE of `transformers` on the same random weights: logits and every gradient."""

import pytest
import torch
import torch.nn.functional as F

from moe_train.assemble import assemble
from moe_train.data.batch import Batch
from moe_train.testing import short_corpus, small_config

# It refuses to be imported beside the lowest safetensors that this package allows.
transformers = pytest.importorskip("transformers", exc_type=ImportError)


def ours_and_theirs(normalize):
    with short_corpus():
        run = assemble(small_config(f"model.router.normalize={str(normalize).lower()}", "model.router.scale=1.0"))
    model = run.config.model
    qwen = transformers.Qwen3MoeConfig(
        vocab_size=257,
        hidden_size=model.model_features,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_features,
        moe_intermediate_size=model.expert_features,
        intermediate_size=model.expert_features,
        num_experts=model.num_experts,
        num_experts_per_tok=model.router.top_k,
        norm_topk_prob=normalize,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rope_theta=model.rope_base,
        rms_norm_eps=model.norm_eps,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    torch.manual_seed(1)
    peer = transformers.Qwen3MoeForCausalLM(qwen)
    return run.model, peer


def name_map(layers):
    pairs = {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "head.weight": "lm_head.weight",
    }
    for i in range(layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        pairs[f"{ours}.attention_norm.weight"] = f"{theirs}.input_layernorm.weight"
        pairs[f"{ours}.moe_norm.weight"] = f"{theirs}.post_attention_layernorm.weight"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            pairs[f"{ours}.attention.{part}.weight"] = f"{theirs}.self_attn.{part}.weight"
        pairs[f"{ours}.moe.router.weight"] = f"{theirs}.mlp.gate.weight"
        pairs[f"{ours}.moe.experts.w1_ED2F"] = f"{theirs}.mlp.experts.gate_up_proj"
        pairs[f"{ours}.moe.experts.w2_EFD"] = f"{theirs}.mlp.experts.down_proj"
    return pairs


@pytest.mark.parametrize("normalize", [True, False])
def test_r031_logits_and_gradients_equal_qwen3_moe(normalize):
    model, peer = ours_and_theirs(normalize)
    mine, theirs = dict(model.named_parameters()), dict(peer.named_parameters())
    pairs = name_map(2)
    assert set(pairs) == set(mine)
    assert set(pairs.values()) == set(theirs)
    for ours, other in pairs.items():
        value = torch.randn(theirs[other].shape) * (0.3 if value_is_matrix(theirs[other]) else 1.0)
        theirs[other].data.copy_(value)
        mine[ours].data.copy_(as_ours(value, mine[ours]))

    for length in (1, 7, 13):
        token_BS = torch.randint(0, 257, (3, length))
        target_BS = torch.randint(0, 257, (3, length))
        batch = Batch.from_rows(token_BS, target_BS, torch.ones(3, length, dtype=torch.bool))
        for parameter in (*mine.values(), *theirs.values()):
            parameter.grad = None
        logits = model(batch.token_BS, batch.sequence_info(), None).logits_BSV
        expected = peer(input_ids=token_BS, use_cache=False).logits
        assert float((logits - expected).detach().abs().max()) < 1e-4
        assert float(expected.detach().abs().mean()) > 0.1
        F.cross_entropy(logits.flatten(0, 1), target_BS.flatten()).backward()
        F.cross_entropy(expected.flatten(0, 1), target_BS.flatten()).backward()
        for ours, other in pairs.items():
            grad = theirs[other].grad
            grad = torch.zeros_like(theirs[other]) if grad is None else grad
            grad = as_ours(grad, mine[ours])
            assert float((mine[ours].grad - grad).norm()) <= 1e-4 * float(grad.norm()) + 1e-6, (length, ours)


def as_ours(theirs, ours):
    """Experts are [E, out, in] there and [E, in, ..] here, gate and up projection in a dim of their own."""
    return theirs.transpose(1, 2).reshape(ours.shape) if theirs.dim() == 3 else theirs


def value_is_matrix(parameter):
    return parameter.dim() > 1
