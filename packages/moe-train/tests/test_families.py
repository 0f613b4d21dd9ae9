"""Every family equals `transformers` on the same random weights: logits, every gradient, balance losses."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moe_kernels.cross_entropy import cross_entropy
from moe_train.data.batch import Batch
from moe_train.hf.config import config_from_hf
from moe_train.hf.families import FAMILIES
from moe_train.hf.names import tensor_maps
from moe_train.hf.tensors import import_tensors
from moe_train.scale import StepScale
from moe_train.testing import small_model

# It refuses to be imported beside the lowest safetensors that this package allows.
transformers = pytest.importorskip("transformers", exc_type=ImportError)

VOCAB = 61
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.0,
}
QWEN = {**COMMON, "moe_intermediate_size": 10, "intermediate_size": 14, "num_experts": 5, "num_experts_per_tok": 2}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
DEEPSEEK = {
    **COMMON,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 14,
    "moe_intermediate_size": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 12,
    "q_lora_rank": 14,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 5,
    "num_nextn_predict_layers": 0,
}
TINY = {
    "qwen3_moe": {
        **QWEN,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "norm_topk_prob": True,
        "mlp_only_layers": [2],
        "decoder_sparse_step": 2,
    },
    "qwen3_moe-yarn": {**QWEN, "num_hidden_layers": 2, "head_dim": 8, "norm_topk_prob": False, "rope_parameters": YARN},
    "qwen2_moe": {**QWEN, "num_hidden_layers": 3, "shared_expert_intermediate_size": 12, "norm_topk_prob": False},
    "qwen2_moe-sliding": {
        **QWEN,
        "num_hidden_layers": 3,
        "shared_expert_intermediate_size": 12,
        "use_sliding_window": True,
        "sliding_window": 4,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        **COMMON,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "intermediate_size": 10,
        "num_local_experts": 5,
        "sliding_window": 5,
    },
    "olmoe": {
        **COMMON,
        "num_hidden_layers": 2,
        "intermediate_size": 10,
        "num_experts": 5,
        "num_experts_per_tok": 3,
        "pad_token_id": None,
    },
    "deepseek_v3": {
        **DEEPSEEK,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v3-other": {
        **DEEPSEEK,
        "q_lora_rank": None,
        "v_head_dim": 16,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707},
    },
}
LENGTHS = (1, 7, 13)


def theirs(name, **options):
    """A model of `transformers` with random weights of order one."""
    family = FAMILIES[name.partition("-")[0]]
    kind = getattr(transformers, family.architecture)
    config = kind.config_class(**{**TINY[name], **options}, attn_implementation="eager", experts_implementation="eager")
    peer = kind(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor_name, tensor in (*peer.named_parameters(), *peer.named_buffers()):
            if "inv_freq" in tensor_name:
                continue
            values = torch.randn(tensor.shape, generator=generator)
            # Vectors (norms, biases) around one; matrices such that features stay of order one.
            tensor.copy_(1 + 0.3 * values if tensor.dim() == 1 else values * 1.2 / tensor.shape[-1] ** 0.5)
        peer.get_input_embeddings().weight.copy_(torch.randn(VOCAB, 24, generator=generator))
    return peer, family


def ours(peer, family, dtype=torch.float32, **options):
    config = config_from_hf(peer.config.to_dict() | options)
    model = small_model(config, VOCAB, dtype)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))
    import_tensors(model, config, family.names, peer.state_dict())
    return model, config


def assert_same_gradients(model, config, family, peer, tolerance=1e-4):
    expected = dict(peer.named_parameters())
    found = {}
    parameters = dict(model.named_parameters())
    for tensor in tensor_maps(family.names, config, parameters, "stacked"):
        found |= tensor.to_theirs(parameters[tensor.ours].grad, config)
    found = {name: grad for name, grad in found.items() if name in expected}
    assert found.keys() == expected.keys()
    # What is zero in exact arithmetic, as the gradient of queries of a single token, is a difference of larger terms.
    largest = max(float(grad.norm()) for grad in found.values())
    for name, grad in found.items():
        other = expected[name].grad
        other = torch.zeros_like(grad) if other is None else other
        assert float((grad - other).norm()) <= tolerance * float(other.norm()) + 1e-6 * largest, name


def assert_same_logits(mine, other):
    assert float(other.detach().abs().mean()) > 0.3
    assert float((mine - other).detach().abs().max()) < 1e-4


def rows(batch, length):
    return torch.randint(0, VOCAB, (batch, length)), torch.randint(0, VOCAB, (batch, length))


@pytest.mark.parametrize("name", TINY)
def test_r025_r031_r108_logits_and_gradients(name):
    peer, family = theirs(name)
    model, config = ours(peer, family)
    for length in LENGTHS:
        token_BS, target_BS = rows(3, length)
        batch = Batch.from_rows(token_BS, target_BS, torch.ones(3, length, dtype=torch.bool))
        model.zero_grad(), peer.zero_grad()
        mine = model(token_BS, batch.sequence_info()).logits_BSV
        other = peer(input_ids=token_BS, use_cache=False).logits
        assert_same_logits(mine, other)
        F.cross_entropy(mine.flatten(0, 1), target_BS.flatten()).backward()
        F.cross_entropy(other.flatten(0, 1), target_BS.flatten()).backward()
        assert_same_gradients(model, config, family, peer)


@pytest.mark.parametrize("name", TINY)
def test_padding_and_documents_in_a_row(name):
    """A padded batch against theirs with an attention mask; a packed row against each document alone in theirs."""
    peer, family = theirs(name)
    model, config = ours(peer, family)
    token_BS, target_BS = rows(2, 9)
    valid_BS = torch.arange(9) < torch.tensor([[9], [4]])
    batch = Batch.from_rows(token_BS, target_BS, valid_BS)
    mine = model(token_BS, batch.sequence_info()).logits_BSV
    other = peer(input_ids=token_BS, attention_mask=valid_BS.long(), use_cache=False).logits
    assert_same_logits(mine[valid_BS], other[valid_BS])
    F.cross_entropy(mine[valid_BS], target_BS[valid_BS]).backward()
    F.cross_entropy(other[valid_BS], target_BS[valid_BS]).backward()
    assert_same_gradients(model, config, family, peer)

    lengths = (5, 1, 8)
    token_BS, target_BS = rows(1, 16)
    document_BS = torch.tensor([[0] * 5 + [1] + [2] * 8 + [3] * 2])
    packed = Batch.from_rows(token_BS, target_BS, torch.arange(16)[None] < 14, document_BS=document_BS)
    model.zero_grad(), peer.zero_grad()
    mine = model(token_BS, packed.sequence_info()).logits_BSV[0, :14]
    alone = [peer(input_ids=part, use_cache=False).logits[0] for part in token_BS[:, :14].split(lengths, 1)]
    other = torch.cat(alone)
    assert_same_logits(mine, other)
    mask_S = packed.target_mask_BS[0, :14]
    assert mask_S.sum() == 4 + 0 + 7
    F.cross_entropy(mine[mask_S], target_BS[0, :14][mask_S]).backward()
    F.cross_entropy(other[mask_S], target_BS[0, :14][mask_S]).backward()
    assert_same_gradients(model, config, family, peer)


def balance_function(peer):
    module = __import__(type(peer).__module__, fromlist=["load_balancing_loss_func"])
    return module.load_balancing_loss_func


def loss_with_balance(model, batch):
    scale = StepScale.count([batch], balance_sequences=batch.num_sequences, loss_norm="token")
    weights = scale.microbatch(batch, torch.float32)
    output = model(batch.token_BS, batch.sequence_info(), weights)
    loss_T = cross_entropy(
        output.logits_BSV.flatten(0, 1), batch.target_BS.flatten(), valid_T=batch.target_mask_BS.flatten()
    )
    return (loss_T * weights.target_weight_T).sum(), output.statistics


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen2_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("layers", [1, None])
def test_r003_r014_the_balance_loss_after_conversion(name, layers):
    """Of one layer, by their own total; of several, which they pool, layer by layer."""
    options = {} if layers is None else {"num_hidden_layers": layers, "mlp_only_layers": [], "decoder_sparse_step": 1}
    peer, family = theirs(name, output_router_logits=True, router_aux_loss_coef=0.3, **options)
    model, config = ours(peer, family)
    token_BS, target_BS = rows(3, 8)
    valid_BS = torch.arange(8) < torch.tensor([[8], [3], [6]])
    batch = Batch.from_rows(token_BS, target_BS, valid_BS)
    output = peer(input_ids=token_BS, attention_mask=valid_BS.long(), use_cache=False, output_router_logits=True)
    ce = F.cross_entropy(output.logits[valid_BS], target_BS[valid_BS])
    top_k, experts = config.router.top_k, config.num_experts
    each = [balance_function(peer)((logits,), experts, top_k, valid_BS.long()) for logits in output.router_logits]
    aux = output.aux_loss if layers == 1 else sum(each) / len(each)
    (ce + 0.3 * aux).backward()
    mine, statistics = loss_with_balance(model, batch)
    mine.backward()
    assert mine.item() == pytest.approx(ce.item(), abs=1e-5)  # R017: the logged loss is without balance losses.
    assert statistics.aux.tolist() == pytest.approx([value.item() / top_k for value in each], abs=1e-5)
    assert_same_gradients(model, config, family, peer)
    with_balance = model.routers()[0].weight.grad.clone()
    model.zero_grad()
    for router in model.routers():
        router.balance = replace(router.balance, aux=0.0)
    loss_with_balance(model, batch)[0].backward()
    assert float((model.routers()[0].weight.grad - with_balance).norm()) > 1e-2 * float(with_balance.norm())


def test_r026_groups_are_closed_by_minus_infinity_in_both():
    """Negative biased scores, which a fill with zero would let win."""
    peer, family = theirs("deepseek_v3")
    for layer in peer.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.fill_(-2.0).add_(torch.randn(8) * 0.1)
    model, _ = ours(peer, family)
    token_BS, _ = rows(2, 13)
    batch = Batch.from_rows(token_BS, token_BS, torch.ones(2, 13, dtype=torch.bool))
    mine = model(token_BS, batch.sequence_info())
    assert_same_logits(mine.logits_BSV, peer(input_ids=token_BS, use_cache=False).logits)
    assert int(mine.statistics.counts.sum()) == 2 * 2 * 13 * 4
