"""Router statistics: what one forward reports about its routing. They are results, never hidden state.

A layer returns them beside its output, so a recomputed forward cannot count twice and evaluation cannot leak into
training. Shape legend: L layers with a router, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_parallel import Groups, all_reduce


@dataclass(frozen=True, kw_only=True)
class RouterStatistics:
    """Sums that add over microbatches and ranks; of one layer, or of all layers with a leading dim L.

    Attributes:
        counts: int64 [E], choices of each expert by valid tokens.
        dropped: int64 scalar, choices of valid tokens that reached no expert.
        overflow: int64 scalar, of these the ones for which the ranks of their experts had no row left.
        bad_rows: int64 scalar, tokens whose router logits were not finite.
        aux, seq, glob, z: the losses of numerics §2 with the weights of the step and without coefficient, detached, so
            that their sum over microbatches is the logged value; zero where a loss is not used.
    """

    counts: Tensor
    dropped: Tensor
    overflow: Tensor
    bad_rows: Tensor
    aux: Tensor
    seq: Tensor
    glob: Tensor
    z: Tensor

    @classmethod
    def stack(cls, layers: Sequence["RouterStatistics"]) -> "RouterStatistics":
        """Of all layers, from those of each."""
        return cls(**{name: torch.stack([getattr(layer, name) for layer in layers]) for name in cls.__annotations__})

    @classmethod
    def nothing(cls, layers: int, experts: int, dtype: torch.dtype, device: torch.device) -> "RouterStatistics":
        """Zeros for so many layers."""
        counts = torch.zeros(layers, experts, dtype=torch.int64, device=device)
        names = ("dropped", "overflow", "bad_rows")
        numbers = {name: torch.zeros(layers, dtype=torch.int64, device=device) for name in names}
        losses = {name: torch.zeros(layers, dtype=dtype, device=device) for name in ("aux", "seq", "glob", "z")}
        return cls(counts=counts, **numbers, **losses)

    def add_(self, row_L: Tensor, layers: Sequence["RouterStatistics"]) -> None:
        """Add those of some layers to their rows; `row_L` is int64."""
        if layers:
            for name, value in vars(RouterStatistics.stack(layers)).items():
                getattr(self, name).index_add_(0, row_L, value)

    def summed(self, losses: Tensor, groups: Groups) -> "tuple[RouterStatistics, Tensor]":
        """Statistics and losses over all ranks, from those of each; one collective for both.

        Every rank routes other tokens or has other layers, but all ranks of `tp` have the losses of the same targets.
        They travel as float64, in which every count below 2**53 is exact.
        """
        group = groups.group("world")
        if group is None:
            return self, losses
        tensors = {**vars(self), "losses": losses if groups.rank("tp") == 0 else torch.zeros_like(losses)}
        packed = torch.cat([tensor.flatten().to(torch.float64) for tensor in tensors.values()])
        parts = torch.split(all_reduce(packed, group).wait(), [tensor.numel() for tensor in tensors.values()])
        found = {
            name: part.view(tensor.shape).to(torch.float64 if tensor.is_floating_point() else tensor.dtype)
            for (name, tensor), part in zip(tensors.items(), parts, strict=True)
        }
        total = found.pop("losses")
        return RouterStatistics(**found), total

    def __add__(self, other: "RouterStatistics") -> "RouterStatistics":
        return RouterStatistics(
            **{name: value + getattr(other, name) for name, value in vars(self).items()},
        )
