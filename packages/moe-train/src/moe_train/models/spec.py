"""`ModelSpec`: the plug-in record of a model family, and the parts that the trainer hands to its builder.

Importing this module does not import torch, so that configuration can be checked without it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_train.models.flops import ModelCosts

if TYPE_CHECKING:
    import torch
    from torch import nn

    from moe_comm import TokenDispatcher
    from moe_kernels.grouped_gemm.api import GroupedGemm
    from moe_memory.initialise import InitRule
    from moe_memory.recompute import ActivationPolicy
    from moe_parallel import AttentionCore

MODEL_INTERFACE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """What a model is built from and does not choose itself.

    Attributes:
        attention: attention over the tokens of a sequence.
        dispatcher: tokens to experts and back.
        grouped_gemm: matrix products of the experts.
        activations: which layers recompute.
        dtype: compute dtype.
        expert_parallel: ranks over which the experts of a layer are spread.
    """

    attention: "AttentionCore"
    dispatcher: "TokenDispatcher[Any]"
    grouped_gemm: "GroupedGemm"
    activations: "ActivationPolicy"
    dtype: "torch.dtype"
    expert_parallel: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model family (entry-point group `moe_train.models`).

    Attributes:
        name: the value of `model.kind` that selects it.
        interface_version: the version of this seam that it was written for.
        config: frozen keyword-only dataclass with `kind: Literal[name]` and `problems() -> list[Problem]`; it has the
            fields `num_layers`, `num_experts` and `router: RouterConfig`.
        available: None if it can be built here, else the reason.
        build: (config, vocabulary size, parts) to the module. Its `forward(token_BS, info, scale)` returns an object
            with `logits_BSV` and `statistics`.
        init_rules: (config) to (pattern of global names, rule) pairs; the first match wins.
        expert_parameters: pattern of the global names of stacked expert weights.
        internal_parameters: patterns of the parameters that stay in the internal dtype.
        costs: (config, vocabulary size) to parameter counts and FLOPs.
    """

    name: str
    interface_version: int
    config: type[Any]
    available: Callable[[], str | None]
    build: Callable[[Any, int, ModelParts], "nn.Module"]
    init_rules: Callable[[Any], "Sequence[tuple[str, InitRule]]"]
    expert_parameters: str
    internal_parameters: tuple[str, ...]
    costs: Callable[[Any, int], ModelCosts]
