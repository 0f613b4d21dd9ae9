"""How a plain module becomes one whose parameters are split over ranks: what is done at its edges, or in its place.

Shape legend: T tokens, V vocabulary, D and F features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from moe_parallel.errors import MoeParallelError
from moe_parallel.groups import Groups
from moe_parallel.plan import part_of
from moe_parallel.tensor import TRANSITIONS, Transition
from moe_parallel.vocabulary import VocabularyEmbedding


class Style(Protocol):
    """Part of a plan."""

    def __call__(self, module: nn.Module, groups: Groups) -> nn.Module:
        """The module for this place: the same one, or another with the same parameters.

        Called before parameters are cut, so that shapes are still those of the whole. Another module keeps their names.
        """


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """Tokens change hands where they enter a module or leave it.

    Attributes:
        inputs: for each positional argument what is done to it, a function of `moe_parallel.tensor`; None is nothing.
            Further arguments, and those given by keyword, stay as they are.
        outputs: the same for the value, or each value of a tuple, that the module returns.
        axis: ranks that share the module.

    Raises:
        MoeParallelError: an unknown function; when the module is called, a value that is missing or no tensor.
    """

    inputs: tuple[Transition | None, ...] = ()
    outputs: tuple[Transition | None, ...] = ()
    axis: str = "tp"

    def __post_init__(self) -> None:
        unknown = [name for name in (*self.inputs, *self.outputs) if name is not None and name not in TRANSITIONS]
        if unknown:
            raise MoeParallelError(f"a boundary can do {', '.join(TRANSITIONS)}, but not {unknown[0]!r}")

    def __call__(self, module: nn.Module, groups: Groups) -> nn.Module:
        group = groups.group(self.axis)
        if group is None:
            return module

        def enter(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
            return _moved(arguments, self.inputs, group, f"positional arguments of {type(module).__name__}")

        def leave(module: nn.Module, _: tuple[Any, ...], value: Any) -> Any:
            name = f"values from {type(module).__name__}"
            if not isinstance(value, tuple):
                return _moved((value,), self.outputs, group, name)[0]
            moved = _moved(value, self.outputs, group, name)
            return moved if type(value) is tuple else type(value)(*moved)  # a named tuple

        if self.inputs:
            module.register_forward_pre_hook(enter)
        if self.outputs:
            module.register_forward_hook(leave)
        return module


def _moved(
    values: tuple[Any, ...], transitions: Sequence[Transition | None], group: ProcessGroup, name: str
) -> tuple[Any, ...]:
    if len(values) < len(transitions):
        raise MoeParallelError(
            f"a boundary moves {len(transitions)} {name}, but there are {len(values)}; it cannot move what is given by "
            "keyword"
        )
    moved = list(values)
    for place, transition in enumerate(transitions):
        if transition is None:
            continue
        if not isinstance(values[place], Tensor):
            raise MoeParallelError(
                f"a boundary moves the {name} by {transition}, but number {place} is no tensor: it is of type "
                f"{type(values[place]).__name__}"
            )
        moved[place] = TRANSITIONS[transition](values[place], group)
    return tuple(moved)


@dataclass(frozen=True, kw_only=True)
class SplitVocabulary:
    """An `nn.Embedding` of which every rank holds consecutive rows; what it returns is its part of a sum over ranks.

    The plan also splits its parameter: dim 0 over the same axis, `uneven`.
    """

    axis: str = "tp"

    def __call__(self, module: nn.Module, groups: Groups) -> nn.Module:
        if not isinstance(module, nn.Embedding):
            raise MoeParallelError(f"a vocabulary is split in an nn.Embedding, not in {type(module).__name__}")
        options = (module.padding_idx, module.max_norm, module.scale_grad_by_freq or None, module.sparse or None)
        if any(option is not None for option in options):
            raise MoeParallelError(
                "a vocabulary is split in an nn.Embedding without padding_idx, max_norm, scale_grad_by_freq and sparse"
            )
        size, ranks = module.num_embeddings, groups.size(self.axis)
        if ranks == 1:
            return module
        first, stop = part_of(size, ranks, groups.rank(self.axis))
        if part_of(size, ranks, ranks - 1)[0] == size:
            raise MoeParallelError(f"a vocabulary of {size} leaves some of {ranks} ranks without an entry")
        return VocabularyEmbedding(module.weight, first=first, rows=stop - first, vocab_size=size)


@dataclass(frozen=True, kw_only=True)
class SharedPieces:
    """An `nn.Linear` that every rank holds, and of whose output features it computes one of a few equal pieces.

    So it is where there are fewer pieces than ranks, such as key/value heads: consecutive ranks compute the same piece.
    The gradient of a rank is zero outside its piece, and the sum over the ranks (`grad_sum_axes`) is that of the whole.

    Attributes:
        pieces: how many there are, a divisor of the number of ranks.
    """

    pieces: int
    axis: str = "tp"

    def __call__(self, module: nn.Module, groups: Groups) -> nn.Module:
        if not isinstance(module, nn.Linear):
            raise MoeParallelError(f"output features are shared out in an nn.Linear, not in {type(module).__name__}")
        ranks, features = groups.size(self.axis), module.out_features
        if self.pieces < 1 or ranks % self.pieces or features % self.pieces:
            raise MoeParallelError(
                f"{features} output features in {self.pieces} equal pieces cannot be shared evenly by {ranks} ranks"
            )
        start, stop = part_of(features, self.pieces, groups.rank(self.axis) * self.pieces // ranks)
        return LinearPiece(module.weight, module.bias, start, stop)


class LinearPiece(nn.Module):
    """The output features `start <= f < stop` of a linear layer whose whole parameters are held."""

    def __init__(self, weight: Tensor, bias: Tensor | None, start: int, stop: int) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.piece = slice(start, stop)
        self.features = weight.shape[0]

    def forward(self, x: Tensor) -> Tensor:
        """[.., D] to [.., stop - start]."""
        if self.weight.shape[0] != self.features:
            raise MoeParallelError(
                f"a piece of {self.features} output features is made of the whole weight, which the plan must not split"
            )
        return F.linear(x, self.weight[self.piece], None if self.bias is None else self.bias[self.piece])
