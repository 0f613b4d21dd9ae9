"""The names of each family's tensors: which of our tensors is made of which tensors of a file.

A file has one of two layouts: `per_expert`, as models are published, with a tensor for each expert, and `stacked`, as
`transformers` 5 holds them, with the experts of a layer in one tensor.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from moe_train.errors import MoeTrainError
from moe_train.hf.conversions import (
    GATE_UP,
    LATENT_KV_DOWN,
    LATENT_QUERY,
    PER_EXPERT,
    PER_EXPERT_GATE_UP,
    SAME,
    STACKED,
    STACKED_GATE_UP,
    Conversion,
)
from moe_train.models.config import DecoderConfig

if TYPE_CHECKING:
    from torch import Tensor

Layout = Literal["per_expert", "stacked"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)


@dataclass(frozen=True, kw_only=True)
class TensorMap:
    """One of our tensors and the tensors of a file of which it is made.

    Attributes:
        ours: global name of a parameter or expert bias.
        theirs: names in the file.
        conversion: between them.
    """

    ours: str
    theirs: tuple[str, ...]
    conversion: Conversion

    def to_ours(self, tensors: "Mapping[str, Tensor]", config: DecoderConfig) -> "Tensor":
        """Our tensor from those of a file."""
        return self.conversion.to_ours([tensors[name] for name in self.theirs], config)

    def to_theirs(self, tensor: "Tensor", config: DecoderConfig) -> "dict[str, Tensor]":
        """The tensors of a file from ours."""
        return dict(zip(self.theirs, self.conversion.to_theirs(tensor, config), strict=True))


@dataclass(frozen=True)
class Part:
    """Where a tensor of a layer comes from: names inside the layer, and how.

    A name with `{e}` stands for one name for each expert, the names of one expert side by side.
    """

    names: tuple[str, ...]
    conversion: Conversion = SAME


Parts = Mapping[str, Part]


@dataclass(frozen=True, kw_only=True)
class FamilyNames:
    """The tensors of a layer of a family, by our names inside the layer.

    Attributes:
        both: in both layouts.
        per_expert, stacked: in one of them.
    """

    both: Parts
    per_expert: Parts
    stacked: Parts


_MODEL = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
# In a file the layers of multi-token prediction have the numbers after the last layer of the model.
_MTP = {
    "embedding_norm.weight": Part(("enorm.weight",)),
    "hidden_norm.weight": Part(("hnorm.weight",)),
    "projection.weight": Part(("eh_proj.weight",)),
    "norm.weight": Part(("shared_head.norm.weight",)),
}
# What a file repeats in each of them.
_MTP_COPIES = {"embed_tokens.weight": "embedding.weight", "shared_head.head.weight": "head.weight"}


def _same(ours: str, theirs: str, *names: str) -> dict[str, Part]:
    return {f"{ours}.{name}": Part((f"{theirs}.{name}",)) for name in names}


def _mlp(ours: str, theirs: str) -> dict[str, Part]:
    return {
        f"{ours}.gate_up_proj.weight": Part((f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight"), GATE_UP),
        **_same(ours, theirs, "down_proj.weight"),
    }


def _per_expert(prefix: str, gate: str, up: str, down: str) -> dict[str, Part]:
    names = [f"{prefix}.experts.{{e}}.{name}.weight" for name in (gate, up, down)]
    return {
        "moe.experts.w1_ED2F": Part((names[0], names[1]), PER_EXPERT_GATE_UP),
        "moe.experts.w2_EFD": Part((names[2],), PER_EXPERT),
    }


_NORMS = {
    "attention_norm.weight": Part(("input_layernorm.weight",)),
    "moe_norm.weight": Part(("post_attention_layernorm.weight",)),
    "mlp_norm.weight": Part(("post_attention_layernorm.weight",)),
}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_ATTENTION = _same(
    "attention",
    "self_attn",
    *(f"{name}.weight" for name in (*_PROJECTIONS, "o_proj", "q_norm", "k_norm")),
    *(f"{name}.bias" for name in _PROJECTIONS),
)
_LATENT_ATTENTION = {
    "attention.q_down_proj.weight": Part(("self_attn.q_a_proj.weight",)),
    "attention.q_norm.weight": Part(("self_attn.q_a_layernorm.weight",)),
    "attention.q_up_proj.weight": Part(("self_attn.q_b_proj.weight",), LATENT_QUERY),
    "attention.q_proj.weight": Part(("self_attn.q_proj.weight",), LATENT_QUERY),
    "attention.kv_down_proj.weight": Part(("self_attn.kv_a_proj_with_mqa.weight",), LATENT_KV_DOWN),
    "attention.kv_norm.weight": Part(("self_attn.kv_a_layernorm.weight",)),
    "attention.kv_up_proj.weight": Part(("self_attn.kv_b_proj.weight",)),
    "attention.o_proj.weight": Part(("self_attn.o_proj.weight",)),
}
_ROUTER = {"moe.router.weight": Part(("mlp.gate.weight",))}
_STACKED = {
    "moe.experts.w1_ED2F": Part(("mlp.experts.gate_up_proj",), STACKED_GATE_UP),
    "moe.experts.w2_EFD": Part(("mlp.experts.down_proj",), STACKED),
}
_PER_EXPERT = _per_expert("mlp", "gate_proj", "up_proj", "down_proj")

QWEN3_MOE = FamilyNames(
    both={**_NORMS, **_ATTENTION, **_ROUTER, **_mlp("mlp", "mlp")}, per_expert=_PER_EXPERT, stacked=_STACKED
)
QWEN2_MOE = FamilyNames(
    both={
        **QWEN3_MOE.both,
        **_mlp("moe.shared.mlp", "mlp.shared_expert"),
        "moe.shared.gate.weight": Part(("mlp.shared_expert_gate.weight",)),
    },
    per_expert=_PER_EXPERT,
    stacked=_STACKED,
)
OLMOE = FamilyNames(both={**_NORMS, **_ATTENTION, **_ROUTER}, per_expert=_PER_EXPERT, stacked=_STACKED)
MIXTRAL = FamilyNames(
    both={**_NORMS, **_ATTENTION},
    per_expert={
        **_per_expert("block_sparse_moe", "w1", "w3", "w2"),
        "moe.router.weight": Part(("block_sparse_moe.gate.weight",)),
    },
    stacked={**_STACKED, **_ROUTER},
)
DEEPSEEK_V3 = FamilyNames(
    both={
        **_NORMS,
        **_LATENT_ATTENTION,
        **_ROUTER,
        "moe.router.bias_E": Part(("mlp.gate.e_score_correction_bias",)),
        **_mlp("mlp", "mlp"),
        **_mlp("moe.shared.mlp", "mlp.shared_experts"),
    },
    per_expert=_PER_EXPERT,
    stacked=_STACKED,
)

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_MTP_LAYER = re.compile(r"mtp\.(\d+)\.(block\.)?(.+)")


def tensor_maps(names: FamilyNames, config: DecoderConfig, ours: Iterable[str], layout: Layout) -> list[TensorMap]:
    """The map of each of our tensors, in a layout of the file.

    Raises:
        MoeTrainError: the family has no place for a tensor, which is named.
    """
    parts = {**names.both, **(names.per_expert if layout == "per_expert" else names.stacked)}
    found = {name: _tensor_map(parts, config, name) for name in ours}
    homeless = [name for name, tensor in found.items() if tensor is None]
    if homeless:
        raise MoeTrainError(f"a file of this family has no place for {', '.join(homeless)}")
    return [tensor for tensor in found.values() if tensor is not None]


def copies(config: DecoderConfig) -> dict[str, str]:
    """What a file with layers of multi-token prediction repeats: name in the file to name of our tensor."""
    head = "embedding.weight" if config.tied_embeddings else "head.weight"
    return {
        f"model.layers.{config.num_layers + depth}.{copy}": head if ours == "head.weight" else ours
        for depth in range(config.mtp_layers)
        for copy, ours in _MTP_COPIES.items()
    }


def _tensor_map(parts: Parts, config: DecoderConfig, ours: str) -> TensorMap | None:
    if ours in _MODEL:
        return TensorMap(ours=ours, theirs=(_MODEL[ours],), conversion=SAME)
    if match := _LAYER.fullmatch(ours):
        layer, part = int(match[1]), parts.get(match[2])
    elif match := _MTP_LAYER.fullmatch(ours):
        layer, part = config.num_layers + int(match[1]), (parts if match[2] else _MTP).get(match[3])
    else:
        return None
    if part is None:
        return None
    experts = range(config.num_experts) if "{e}" in part.names[0] else (0,)
    theirs = [f"model.layers.{layer}.{name.format(e=expert)}" for expert in experts for name in part.names]
    return TensorMap(ours=ours, theirs=tuple(theirs), conversion=part.conversion)
