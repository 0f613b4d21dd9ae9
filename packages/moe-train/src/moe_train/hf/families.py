"""The public families: tables between the options of a `config.json` of Hugging Face and ours."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_train.errors import MoeTrainError
from moe_train.hf.names import DEEPSEEK_V3, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE, FamilyNames
from moe_train.models.config import DecoderConfig

Values = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class HFFamily:
    """A public family: a table between its options and ours.

    Attributes:
        model_type: its name in `config.json`.
        architecture: class in `transformers`.
        names: of tensors.
        options: our dotted option to theirs, where a value is all that travels.
        fixed: what the family is, in our options.
        required: their options that must have this value, if the file has them.
        read: the rest of our options from theirs.
        write: the rest of their options from ours.
    """

    model_type: str
    architecture: str
    names: FamilyNames
    options: Mapping[str, str]
    fixed: Mapping[str, Any]
    required: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], Values]
    write: Callable[[DecoderConfig], Values]


_COMMON = {
    "num_layers": "num_hidden_layers",
    "model_features": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "router.top_k": "num_experts_per_tok",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
    "activation": "hidden_act",
}
_EXPERTS = {"num_experts": "num_experts", "expert_features": "moe_intermediate_size"}
_NORMALIZE = {"router.normalize": "norm_topk_prob"}


def _head(hf: Mapping[str, Any]) -> Values:
    return {"head_features": hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]}


def _aux(hf: Mapping[str, Any], dense: tuple[int, ...]) -> Values:
    """Their balance loss counts every choice and is one for all layers together; ours is the mean of K choices, and one
    for each layer."""
    layers = hf["num_hidden_layers"] - len(dense)
    coefficient = hf.get("router_aux_loss_coef", 0.0) if hf.get("output_router_logits") else 0.0
    return {"balance.aux": coefficient * hf["num_experts_per_tok"] / layers}


def _write_aux(config: DecoderConfig) -> Values:
    layers = config.num_layers - len(config.dense_layers)
    return {
        "router_aux_loss_coef": config.balance.aux * layers / config.router.top_k,
        "output_router_logits": config.balance.aux > 0,
    }


def _qwen_dense(hf: Mapping[str, Any]) -> tuple[int, ...]:
    step, dense = hf.get("decoder_sparse_step", 1), hf.get("mlp_only_layers") or []
    return tuple(i for i in range(hf["num_hidden_layers"]) if i in dense or (i + 1) % step)


def _read_qwen(hf: Mapping[str, Any]) -> Values:
    dense = _qwen_dense(hf)
    dense_features = hf["intermediate_size"] if dense else None
    return {**_head(hf), **_aux(hf, dense), "dense_layers": dense, "dense_features": dense_features}


def _read_qwen3(hf: Mapping[str, Any]) -> Values:
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    return {**_read_qwen(hf), "sliding_window": window}


def _read_qwen2(hf: Mapping[str, Any]) -> Values:
    layers = hf["num_hidden_layers"]
    window = hf.get("sliding_window") if hf.get("use_sliding_window") else None
    kinds = hf.get("layer_types") or [
        "sliding_attention" if i % 2 == 0 and i < hf.get("max_window_layers", 28) else "full_attention"
        for i in range(layers)
    ]
    full = tuple(i for i in range(layers) if kinds[i] == "full_attention")
    if window is None or len(full) == layers:
        return _read_qwen(hf)
    return {**_read_qwen(hf), "sliding_window": window, "full_attention_layers": full}


def _write_qwen(config: DecoderConfig) -> Values:
    return {
        **_write_aux(config),
        "head_dim": config.head_features,
        "intermediate_size": config.dense_features or config.expert_features,
        "mlp_only_layers": list(config.dense_layers),
        "decoder_sparse_step": 1,
        "use_sliding_window": config.sliding_window is not None,
        "sliding_window": config.sliding_window,
    }


def _write_qwen2(config: DecoderConfig) -> Values:
    kinds = [
        "full_attention" if config.window(layer) is None else "sliding_attention" for layer in range(config.num_layers)
    ]
    return {**_write_qwen(config), "layer_types": kinds}


def _read_mixtral(hf: Mapping[str, Any]) -> Values:
    return {**_head(hf), **_aux(hf, ()), "sliding_window": hf.get("sliding_window")}


def _write_mixtral(config: DecoderConfig) -> Values:
    return {**_write_aux(config), "sliding_window": config.sliding_window, "head_dim": config.head_features}


def _read_olmoe(hf: Mapping[str, Any]) -> Values:
    return {**_head(hf), **_aux(hf, ())}


def _read_deepseek(hf: Mapping[str, Any]) -> Values:
    dense = tuple(range(hf["first_k_dense_replace"]))
    return {
        "dense_layers": dense,
        "dense_features": hf["intermediate_size"] if dense else None,
        "shared_features": hf["n_shared_experts"] * hf["moe_intermediate_size"],
        "mtp_layers": hf.get("num_nextn_predict_layers", 0),
    }


def _write_deepseek(config: DecoderConfig) -> Values:
    if config.dense_layers != tuple(range(len(config.dense_layers))):
        raise MoeTrainError(f"dense layers of deepseek_v3 are the first ones, not {config.dense_layers}")
    shared, rest = divmod(config.shared_features or 0, config.expert_features)
    if rest or not shared:
        raise MoeTrainError(
            f"the shared expert of deepseek_v3 is as wide as one or several experts of {config.expert_features} "
            f"features, not {config.shared_features}"
        )
    return {
        "first_k_dense_replace": len(config.dense_layers),
        "intermediate_size": config.dense_features or config.expert_features,
        "n_shared_experts": shared,
        "num_nextn_predict_layers": config.mtp_layers,
    }


_GROUPED = {"attention": "grouped", "router.score": "softmax"}
_PLAIN = {"attention_bias": False, "attention_dropout": 0.0}

FAMILIES = {
    family.model_type: family
    for family in (
        HFFamily(
            model_type="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            names=QWEN3_MOE,
            options={**_COMMON, **_EXPERTS, **_NORMALIZE},
            fixed={**_GROUPED, "qk_norm": "head"},
            required=_PLAIN,
            read=_read_qwen3,
            write=_write_qwen,
        ),
        HFFamily(
            model_type="qwen2_moe",
            architecture="Qwen2MoeForCausalLM",
            names=QWEN2_MOE,
            options={
                **_COMMON,
                **_EXPERTS,
                **_NORMALIZE,
                "qkv_bias": "qkv_bias",
                "shared_features": "shared_expert_intermediate_size",
            },
            fixed={**_GROUPED, "qk_norm": "none", "shared_gate": True},
            required={"attention_dropout": 0.0},
            read=_read_qwen2,
            write=_write_qwen2,
        ),
        HFFamily(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            names=MIXTRAL,
            options={**_COMMON, "num_experts": "num_local_experts", "expert_features": "intermediate_size"},
            fixed={**_GROUPED, "qk_norm": "none", "router.normalize": True},
            required={"attention_dropout": 0.0, "router_jitter_noise": 0.0},
            read=_read_mixtral,
            write=_write_mixtral,
        ),
        HFFamily(
            model_type="olmoe",
            architecture="OlmoeForCausalLM",
            names=OLMOE,
            options={**_COMMON, **_NORMALIZE, "num_experts": "num_experts", "expert_features": "intermediate_size"},
            fixed={**_GROUPED, "qk_norm": "all"},
            required={**_PLAIN, "clip_qkv": None},
            read=_read_olmoe,
            write=_write_aux,
        ),
        HFFamily(
            model_type="deepseek_v3",
            architecture="DeepseekV3ForCausalLM",
            names=DEEPSEEK_V3,
            options={
                **_COMMON,
                **_NORMALIZE,
                "num_experts": "n_routed_experts",
                "expert_features": "moe_intermediate_size",
                "head_features": "qk_nope_head_dim",
                "latent.rotary_features": "qk_rope_head_dim",
                "latent.value_features": "v_head_dim",
                "latent.kv_features": "kv_lora_rank",
                "latent.query_features": "q_lora_rank",
                "router.scale": "routed_scaling_factor",
                "router.groups": "n_group",
                "router.group_top_k": "topk_group",
            },
            fixed={
                "attention": "latent",
                "qk_norm": "none",
                "router.score": "sigmoid",
                # That of DeepSeek-V3 for most of its training; a file does not say it.
                "balance.bias_rate": 1e-3,
            },
            required={**_PLAIN, "rope_interleave": True},
            read=_read_deepseek,
            write=_write_deepseek,
        ),
    )
}
