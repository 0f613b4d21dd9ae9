"""Names, shapes and options of Hugging Face, both ways, against files that `transformers` writes itself."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from moe_parallel import AxisGroups
from moe_train.data.batch import Batch
from moe_train.errors import MoeTrainError
from moe_train.hf.config import config_from_hf, config_to_hf
from moe_train.hf.families import FAMILIES
from moe_train.hf.names import DEEPSEEK_V3, LAYOUTS
from moe_train.hf.tensors import export_tensors, import_tensors, our_tensors
from moe_train.models.bias import bias_tensors
from moe_train.models.block import DenseBlock
from moe_train.models.flops import decoder_costs
from moe_train.testing import small_model

transformers = pytest.importorskip("transformers", exc_type=ImportError)

VOCAB = 61
QWEN = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 10,
    "intermediate_size": 14,
    "num_experts": 5,
    "num_experts_per_tok": 2,
}
MIXTRAL = {**{k: v for k, v in QWEN.items() if k != "num_experts"}, "num_local_experts": 5}
DEEPSEEK = {
    **MIXTRAL,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "num_local_experts": 6,
    "n_group": 3,
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
CASES = {
    "qwen3_moe": {**QWEN, "mlp_only_layers": [2], "decoder_sparse_step": 1, "head_dim": 8},
    "qwen3_moe-step": {**QWEN, "num_hidden_layers": 5, "mlp_only_layers": [3], "decoder_sparse_step": 2, "head_dim": 8},
    "qwen2_moe": {**QWEN, "shared_expert_intermediate_size": 12, "tie_word_embeddings": True},
    "mixtral": MIXTRAL,
    "olmoe": {**{k: v for k, v in QWEN.items() if k != "moe_intermediate_size"}, "pad_token_id": None},
    "deepseek_v3": DEEPSEEK,
}


def peer_of(name):
    family = FAMILIES[name.partition("-")[0]]
    kind = getattr(transformers, family.architecture)
    peer = kind(kind.config_class(**CASES[name]))
    with torch.no_grad():
        for tensor_name, tensor in (*peer.named_parameters(), *peer.named_buffers()):
            if "inv_freq" not in tensor_name:
                tensor.normal_()
    return peer, family


def empty(config, dtype=torch.float32):
    model = small_model(config, VOCAB, dtype)
    with torch.no_grad():
        for tensor in our_tensors(model).values():
            tensor.fill_(float("nan"))
    return model


@pytest.mark.parametrize("name", CASES)
def test_r104_a_published_file_and_its_stacked_form_go_in_and_out_bitwise(name, tmp_path):
    peer, family = peer_of(name)
    peer.save_pretrained(tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    config = config_from_hf(peer.config.to_dict())
    memory = dict(peer.state_dict())
    if config.tied_embeddings:
        del memory["lm_head.weight"]
    for layout, tensors in (("per_expert", file), ("stacked", memory)):
        model = empty(config)
        import_tensors(model, config, family.names, tensors)
        assert not any(tensor.isnan().any() for tensor in our_tensors(model).values())
        out = export_tensors(model, config, family.names, layout=layout)
        assert out.keys() == tensors.keys()
        assert all(torch.equal(out[key], value) for key, value in tensors.items())
    assert len(file) > len(memory)


@pytest.mark.parametrize("name", CASES)
def test_r125_layer_kinds_counts_and_options_both_ways(name):
    peer, family = peer_of(name)
    config = config_from_hf(peer.config.to_dict())
    model = small_model(config, VOCAB, torch.float32)
    theirs = ["experts" in dict(layer.mlp.named_children()) for layer in peer.model.layers]
    assert [not isinstance(layer, DenseBlock) for layer in model.layers] == theirs
    assert [not config.is_dense(layer) for layer in range(config.num_layers)] == theirs
    parameters = sum(p.numel() for p in peer.parameters())
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert decoder_costs(config, VOCAB).parameters == parameters
    # What we write is read by transformers as the same model, and by us as the same configuration.
    hf = config_to_hf(config, family, VOCAB)
    assert config_from_hf(hf) == config
    again = type(peer.config)(**{key: value for key, value in hf.items() if key != "model_type"})
    assert config_from_hf(again.to_dict()) == config


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
def test_r104_a_renamed_missing_or_misshapen_tensor_is_an_error_and_changes_nothing(name):
    peer, family = peer_of(name)
    config = config_from_hf(peer.config.to_dict())
    model = empty(config)
    good = dict(peer.state_dict())
    key = "model.layers.1.mlp.experts.down_proj"
    renamed = {key.replace("down", "dwn") if k == key else k: v for k, v in good.items()}
    with pytest.raises(MoeTrainError, match=r"lacks .*down_proj \(is it .*dwn_proj\?\); the model has no place for"):
        import_tensors(model, config, family.names, renamed)
    with pytest.raises(MoeTrainError, match=r"lacks model\.norm\.weight"):
        import_tensors(model, config, family.names, {k: v for k, v in good.items() if k != "model.norm.weight"})
    with pytest.raises(MoeTrainError, match="no place for extra"):
        import_tensors(model, config, family.names, {**good, "extra": torch.ones(1)})
    with pytest.raises(MoeTrainError, match=r"w2_EFD would have the shape \[4, 10, 24\]"):
        import_tensors(model, config, family.names, {**good, key: good[key][:4]})
    assert all(tensor.isnan().all() for tensor in our_tensors(model).values())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_r019_r104_r105_deepseek_with_mtp_and_bias_in_a_bf16_file(layout):
    config = config_from_hf({**transformers.DeepseekV3Config(**DEEPSEEK).to_dict(), "num_nextn_predict_layers": 2})
    model = empty(config, torch.bfloat16)
    for tensor in our_tensors(model).values():
        tensor.detach().normal_()
    biases = [router.bias_E.copy_(6.9 + 1e-3 * torch.arange(6)).clone() for router in model.routers()]
    file = export_tensors(model, config, DEEPSEEK_V3, layout=layout)
    assert {
        *("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"),
        *("embed_tokens.weight", "shared_head.head.weight", "mlp.gate.e_score_correction_bias"),
    } <= {key.removeprefix("model.layers.4.") for key in file}
    assert file["model.layers.4.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert file["model.layers.1.self_attn.o_proj.weight"].dtype == torch.bfloat16
    again = empty(config, torch.bfloat16)
    places = [router.bias_E.data_ptr() for router in again.routers()]
    import_tensors(again, config, DEEPSEEK_V3, file)
    for mine, other in zip(our_tensors(again).values(), our_tensors(model).values(), strict=True):
        assert torch.equal(mine, other)
        assert mine.dtype == other.dtype
    again.to(torch.float16).to(torch.bfloat16).half()
    assert all(torch.equal(a.bias_E, b) for a, b in zip(again.routers(), biases, strict=True))
    # R094: the same storage all along, so that who holds it sees what changes.
    assert [router.bias_E.data_ptr() for router in again.routers()] == places
    assert len(list(bias_tensors(again, AxisGroups()))) == 4
    wrong = {**file, "model.layers.3.embed_tokens.weight": file["model.layers.3.embed_tokens.weight"] + 1}
    with pytest.raises(MoeTrainError, match=r"layers\.3\.embed_tokens\.weight differs from embedding\.weight"):
        import_tensors(again, config, DEEPSEEK_V3, wrong)


def test_r105_a_family_without_bias_has_none():
    peer, family = peer_of("qwen3_moe")
    config = config_from_hf(peer.config.to_dict())
    model = empty(config)
    import_tensors(model, config, family.names, peer.state_dict())
    assert [router.bias_E for router in model.routers()] == [None, None]
    assert not list(model.buffers())
    biased = replace(config, balance=replace(config.balance, bias_rate=1e-3))
    model = small_model(biased, VOCAB, torch.float32)
    with pytest.raises(MoeTrainError, match=r"no place for layers\.0\.moe\.router\.bias_E"):
        export_tensors(model, biased, family.names)


def test_r107_a_head_in_the_file_of_a_tied_model_must_be_the_embedding():
    peer, family = peer_of("qwen2_moe")
    config = config_from_hf(peer.config.to_dict())
    tensors = dict(peer.state_dict())
    model = empty(config)
    import_tensors(model, config, family.names, {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]})
    assert "lm_head.weight" not in export_tensors(model, config, family.names)
    other = tensors["model.embed_tokens.weight"] + 1
    with pytest.raises(MoeTrainError, match=r"lm_head\.weight differs from embedding\.weight.*tied embeddings"):
        import_tensors(model, config, family.names, {**tensors, "lm_head.weight": other})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "unknown model_type 'gpt2'; known here: deepseek_v3, mixtral"),
        ({"attention_bias": True}, "with attention_bias = True is not supported"),
        ({"num_experts": None, "num_local_experts": None}, "lacks num_experts"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "rotary positions .* not supported"),
    ],
)
def test_options_that_our_models_do_not_have_are_refused(change, message):
    hf = transformers.Qwen3MoeConfig(**CASES["qwen3_moe"]).to_dict() | change
    with pytest.raises(MoeTrainError, match=message):
        config_from_hf({key: value for key, value in hf.items() if value is not None})


def test_what_a_file_of_the_family_cannot_say_is_not_dropped_silently():
    config = config_from_hf(transformers.Qwen3MoeConfig(**CASES["qwen3_moe"]).to_dict())
    wider = replace(config, shared_features=8, moe_latent_features=12, router=replace(config.router, scale=2.0))
    with pytest.raises(MoeTrainError, match=r"cannot say shared_features, moe_latent_features, router\.scale"):
        config_to_hf(wider, FAMILIES["qwen3_moe"], VOCAB)


@pytest.mark.parametrize(
    ("kind", "options", "total"),
    [
        ("Qwen3MoeConfig", {"num_hidden_layers": 48, "head_dim": 128, "vocab_size": 151_936}, 30_532_122_624),
        ("MixtralConfig", {}, 46_702_792_704),
        ("DeepseekV3Config", {"num_nextn_predict_layers": 0}, 671_026_419_200),
    ],
)
def test_r124_published_models_on_the_meta_device(kind, options, total):
    hf = getattr(transformers, kind)(**options).to_dict()
    config = config_from_hf(hf)
    with torch.device("meta"):
        model = small_model(config, hf["vocab_size"], torch.bfloat16)
    # Expert biases are counted where a model is published, though they are not trained by gradients.
    assert sum(tensor.numel() for tensor in our_tensors(model).values()) == total
    biases = sum(buffer.numel() for buffer in model.buffers())
    assert decoder_costs(config, hf["vocab_size"]).parameters == total - biases


def test_the_bias_steers_the_same_choices_after_a_round_trip():
    peer, family = peer_of("deepseek_v3")
    config = config_from_hf(peer.config.to_dict())
    model, again = empty(config), empty(config)
    import_tensors(model, config, family.names, peer.state_dict())
    import_tensors(again, config, family.names, export_tensors(model, config, family.names))
    token_BS = torch.randint(0, VOCAB, (2, 11))
    batch = Batch.from_rows(token_BS, token_BS, torch.ones(2, 11, dtype=torch.bool))
    first, second = (m(token_BS, batch.sequence_info()).statistics.counts for m in (model, again))
    assert torch.equal(first, second)
    for router in again.routers():
        router.bias_E.zero_()
    assert not torch.equal(again(token_BS, batch.sequence_info()).statistics.counts, first)
