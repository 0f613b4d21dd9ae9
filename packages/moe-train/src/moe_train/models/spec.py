"""`ModelSpec`: the plug-in record of a model family, and the parts that the trainer hands to its builder.

Importing this module does not import torch, so that configuration can be checked without it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from moe_train.models.flops import ModelCosts

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from moe_comm import Sizing, TokenDispatcher
    from moe_kernels.grouped_gemm.api import GroupedGemm
    from moe_memory.initialise import InitRule
    from moe_memory.recompute import ActivationPolicy
    from moe_parallel import AttentionCore, ParallelConfig, ParallelPlan, Problem, SequenceInfo
    from moe_parallel.pipeline.chunk import Segment
    from moe_parallel.pipeline.layout import PipelineLayout, Stage
    from moe_train.models.statistics import RouterStatistics
    from moe_train.scale import MicrobatchScale

MODEL_INTERFACE_VERSION = 2

CrossEntropy: TypeAlias = "Callable[[Tensor, Tensor, Tensor], Tensor]"


@dataclass(frozen=True, kw_only=True)
class ModelParts:
    """What a model is built from and does not choose itself.

    Attributes:
        attention: attention over the tokens of a sequence.
        dispatcher: tokens to experts and back.
        sizing: of the rows that experts get in training.
        grouped_gemm: matrix products of the experts.
        activations: which layers recompute.
        cross_entropy: (logits [T, V], targets [T], which of them count [T]) to the loss of each target [T] in the
            internal dtype, zero where it does not count.
        dtype: compute dtype.
    """

    attention: "AttentionCore"
    dispatcher: "TokenDispatcher[Any]"
    sizing: "Sizing"
    grouped_gemm: "GroupedGemm"
    activations: "ActivationPolicy"
    cross_entropy: "CrossEntropy"
    dtype: "torch.dtype"


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
        row: its place among all routers of the model, here or on another rank.
        bias_E: the expert bias, in the internal dtype; None where there is none.
    """

    @property
    def name(self) -> str: ...

    @property
    def row(self) -> int: ...

    @property
    def bias_E(self) -> "Tensor | None": ...

    def update_bias(self, counts_E: "Tensor") -> None:
        """Move the bias, if there is one, by the choices of an optimizer step over all ranks (numerics §3)."""


class CausalModel(Protocol):
    """What the trainer needs of a module beyond being one.

    The forward is also available in segments over a context, so that gradients can be reported layer by layer: `x =
    token_BS`, then `x = segment.run(x, context)` for each, after which `x` is logits [B*S, V], `context.statistics` the
    list of `RouterStatistics`, one for each of `routers()` in their order, and `context.losses` further terms of the
    loss by name, weighted as `scale` says, without coefficient and detached.

    Attributes:
        depths: tokens that are predicted beyond the next one in training (`MicrobatchScale.ahead`).
        features: of a token between two stages of a pipeline.
    """

    @property
    def depths(self) -> int: ...

    @property
    def features(self) -> int: ...

    def routers(self) -> "Sequence[RouterLayer]":
        """Those that are here, in the order of their statistics."""

    def keep(self, stages: "Sequence[Stage]") -> None:
        """Drop what these stages of a pipeline do not need; names stay those of the whole model."""

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...

    def named_parameters(self) -> "Iterator[tuple[str, nn.Parameter]]": ...

    def __call__(self, token_BS: "Tensor", info: "SequenceInfo", scale: "MicrobatchScale | None") -> ModelOutput: ...

    def context(self, info: "SequenceInfo", scale: "MicrobatchScale | None") -> Any: ...

    def segments(self, stage: "Stage | None" = None) -> "Sequence[Segment[Any]]":
        """Of a stage of a pipeline, or of the whole model."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model family (entry-point group `moe_train.models`).

    Attributes:
        name: the value of `model.kind` that selects it.
        interface_version: the version of this seam that it was written for.
        config: frozen keyword-only dataclass with `kind: Literal[name]` and `problems() -> list[Problem]`; it has the
            fields `num_experts`, `router: RouterConfig` and `balance: BalanceConfig`.
        available: None if it can be built here, else the reason.
        build: (config, vocabulary size, parts) to the whole module, a `CausalModel`. It is called where modules have no
            storage (`moe_parallel.without_storage`): what it computes once and keeps must be made on a real device.
        init_rules: (config) to (pattern of global names, rule) pairs; the first match wins.
        plan: (config, degrees of parallelism) to how the module is spread over ranks.
        stages: (config, degrees of parallelism) to the stages of a pipeline.
        shared: (config, stages) to the ranks of the pipeline that hold a parameter of several stages, by the axis over
            which its gradient is summed (`moe_parallel.sharding.SHARED_AXES`).
        problems: (config, vocabulary size, degrees of parallelism) to every rule that such a plan would violate.
        internal_parameters: patterns of the parameters that stay in the internal dtype.
        costs: (config, vocabulary size) to parameter counts and FLOPs.
        units: (config) to the units of every layer that its modules name (`moe_memory.LayerUnits`), by the name of the
            layer; of those that are not there only whole layers are recomputed, and nothing is offloaded.
    """

    name: str
    interface_version: int
    config: type[Any]
    available: Callable[[], str | None]
    build: Callable[[Any, int, ModelParts], "CausalModel"]
    init_rules: Callable[[Any], "Sequence[tuple[str, InitRule]]"]
    plan: "Callable[[Any, ParallelConfig], ParallelPlan]"
    stages: "Callable[[Any, ParallelConfig], PipelineLayout]"
    shared: "Callable[[Any, PipelineLayout], Mapping[str, Sequence[int]]]"
    problems: "Callable[[Any, int, ParallelConfig], Sequence[Problem]]"
    internal_parameters: tuple[str, ...]
    costs: Callable[[Any, int], ModelCosts]
    units: Callable[[Any], Mapping[str, frozenset[str]]] = lambda _: {}
