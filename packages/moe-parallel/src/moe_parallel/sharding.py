"""`ShardSpec` and `Box`: what a plain local parameter is globally, and which part of it a rank holds."""

from dataclasses import dataclass
from enum import Enum

from moe_parallel.errors import MoeParallelError


class ParameterKind(Enum):
    """Which view of the world a parameter lives in: dense over `pp dp cp tp`, expert over `pp edp ep etp`."""

    DENSE = "dense"
    EXPERT = "expert"


# Axes over which a parameter may be split, and those over which it is replicated while its gradient is summed.
SPLIT_AXES = {ParameterKind.DENSE: ("tp",), ParameterKind.EXPERT: ("etp", "ep")}
# Ranks of a pipeline whose stages hold one parameter: where a model uses the embedding, or the output projection, in
# several stages. Each of them sees other uses of it, so that gradients are summed over these axes.
SHARED_AXES = ("pp_embedding", "pp_head")
REPLICA_AXES = {ParameterKind.DENSE: ("cp", "dp"), ParameterKind.EXPERT: ("edp",)}


@dataclass(frozen=True)
class Box:
    """An N-dimensional rectangle of a global tensor: `offset[d] <= index[d] < offset[d] + shape[d]`."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise MoeParallelError(f"a box needs as many offsets as sizes: {self.offset} and {self.shape}")

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """The box that covers a tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """The global meaning of one local parameter.

    Attributes:
        name: global name, the same on every rank and in every layout.
        shape: global shape.
        kind: dense or expert; decides over which ranks the parameter is replicated and its gradient summed.
        placements: pairs (axis, tensor dim): the tensor is split along the dim over the axis; every other axis
            replicates it.
        grad_sum_axes: further axes over which gradients must be summed, because ranks there see different tokens
            through a replicated parameter.
        uneven: parts may differ in size (`local_box`), as those of a vocabulary that no number of ranks divides.
    """

    name: str
    shape: tuple[int, ...]
    kind: ParameterKind = ParameterKind.DENSE
    placements: tuple[tuple[str, int], ...] = ()
    grad_sum_axes: tuple[str, ...] = ()
    uneven: bool = False

    @property
    def copy_axes(self) -> tuple[str, ...]:
        """Axes over which ranks hold the same part of the parameter, besides those of replicas."""
        split = {axis for axis, _ in self.placements}
        shared = (axis for axis in SHARED_AXES if axis in self.grad_sum_axes)
        return (*(axis for axis in SPLIT_AXES[self.kind] if axis not in split), *shared)
