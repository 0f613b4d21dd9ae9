"""Which units the layers of the decoder have. Imports nothing heavy."""

from collections.abc import Mapping

from moe_train.models.config import DecoderConfig


def layer_name(config: DecoderConfig, layer: int) -> str:
    """`layers.3`, or of a layer of multi-token prediction `mtp.0`."""
    return f"layers.{layer}" if layer < config.num_layers else f"mtp.{layer - config.num_layers}"


def decoder_units(config: DecoderConfig) -> Mapping[str, frozenset[str]]:
    """The units of every layer by its name: of recompute, and those whose input may be offloaded."""
    attention = {"layernorm", "core_attn", *(["mla_up_proj"] if config.attention == "latent" else [])}
    attention |= {"attn_norm", "qkv_linear", "attn_proj", "mlp_norm"}
    experts = {"moe", "moe_act", "expert_fc1", *(["shared_experts"] if config.shared_features is not None else [])}
    return {
        layer_name(config, layer): frozenset(attention | ({"mlp"} if config.is_dense(layer) else experts) | {"full"})
        for layer in range(config.num_layers + config.mtp_layers)
    }
