"""`ModelSpec`: the plug-in record of a model family, and the parts that the trainer hands to its builder.

Importing this module does not import torch, so that configuration can be checked without it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from moe_parallel.plan import PlanRule
from moe_train.models.flops import ModelCosts

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from moe_comm import TokenDispatcher
    from moe_kernels.grouped_gemm.api import GroupedGemm
    from moe_memory.initialise import InitRule
    from moe_memory.recompute import ActivationPolicy
    from moe_parallel import AttentionCore, SequenceInfo
    from moe_parallel.pipeline.chunk import Segment
    from moe_train.models.statistics import RouterStatistics
    from moe_train.scale import MicrobatchScale

MODEL_INTERFACE_VERSION = 2


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


class ModelOutput(Protocol):
    """What one forward gives."""

    @property
    def logits_BSV(self) -> "Tensor": ...

    @property
    def statistics(self) -> "RouterStatistics": ...


class RouterLayer(Protocol):
    """A layer that chooses experts, as the trainer sees it.

    Attributes:
        name: of the layer, unique in the model.
        bias_E: the expert bias, in the internal dtype; None where there is none.
    """

    @property
    def name(self) -> str: ...

    @property
    def bias_E(self) -> "Tensor | None": ...

    def update_bias(self, counts_E: "Tensor") -> None:
        """Move the bias, if there is one, by the choices of an optimizer step over all ranks (numerics §3)."""


class CausalModel(Protocol):
    """What the trainer needs of a module beyond being one.

    The forward is also available in segments over a context, so that gradients can be reported layer by layer: `x =
    token_BS`, then `x = segment.run(x, context)` for each, after which `x` is `logits_BSV`, `context.statistics` the
    list of `RouterStatistics`, one for each of `routers()` in their order, and `context.losses` further terms of the
    loss by name, weighted as `scale` says, without coefficient and detached.

    Attributes:
        depths: tokens that are predicted beyond the next one in training (`MicrobatchScale.ahead`).
    """

    @property
    def depths(self) -> int: ...

    def routers(self) -> "Sequence[RouterLayer]": ...

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...

    def named_parameters(self) -> "Iterator[tuple[str, nn.Parameter]]": ...

    def __call__(self, token_BS: "Tensor", info: "SequenceInfo", scale: "MicrobatchScale | None") -> ModelOutput: ...

    def context(self, info: "SequenceInfo", scale: "MicrobatchScale | None") -> Any: ...

    def segments(self) -> "Sequence[Segment[Any]]": ...


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model family (entry-point group `moe_train.models`).

    Attributes:
        name: the value of `model.kind` that selects it.
        interface_version: the version of this seam that it was written for.
        config: frozen keyword-only dataclass with `kind: Literal[name]` and `problems() -> list[Problem]`; it has the
            fields `num_experts`, `router: RouterConfig` and `balance: BalanceConfig`.
        available: None if it can be built here, else the reason.
        build: (config, vocabulary size, parts) to the module, a `CausalModel`.
        init_rules: (config) to (pattern of global names, rule) pairs; the first match wins.
        plan: how parameters are split over ranks; without a rule they are dense and whole on every rank.
        internal_parameters: patterns of the parameters that stay in the internal dtype.
        costs: (config, vocabulary size) to parameter counts and FLOPs.
    """

    name: str
    interface_version: int
    config: type[Any]
    available: Callable[[], str | None]
    build: Callable[[Any, int, ModelParts], "CausalModel"]
    init_rules: Callable[[Any], "Sequence[tuple[str, InitRule]]"]
    plan: tuple[PlanRule, ...]
    internal_parameters: tuple[str, ...]
    costs: Callable[[Any, int], ModelCosts]
