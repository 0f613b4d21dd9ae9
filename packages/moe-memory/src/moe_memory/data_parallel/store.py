"""`Store`: how an engine keeps a set of parameters; between the seam and what differs from engine to engine."""

from collections.abc import Collection, Sequence
from typing import Protocol

from torch import Tensor

from moe_memory.data_parallel.bucket import BucketKey
from moe_parallel import Box


class Store(Protocol):
    """Gradients, master weights and compute weights of some parameters of one kind.

    Masters and gradients come as lists of tensors that match one by one; optimizers and norms treat them as wholes.
    They hold this rank's part of the parameters and zeros.
    """

    @property
    def names(self) -> Collection[str]: ...

    def masters(self) -> Sequence[tuple[Tensor, BucketKey]]:
        """Master weights, updated in place, and what the parameters in each have in common."""

    def gradients(self) -> Sequence[Tensor]:
        """Gradients between `finish_reduction` and `clear_gradients`; may be changed in place."""

    def box(self, name: str) -> Box | None:
        """This rank's part, in the coordinates of what it holds of the parameter; None where it has nothing to show."""

    def place(self, name: str) -> tuple[int, int]:
        """Which of the masters has this rank's part of a parameter, and its first element there."""

    def part(self, tensors: Sequence[Tensor], name: str) -> Tensor:
        """This rank's part of a parameter, in tensors that are laid out as `masters`."""

    def has_gradient(self, name: str) -> bool:
        """Whether a backward has reached the parameter since the last `collect`."""

    def collect(self, name: str) -> None:
        """Add the gradient of one backward to those before it."""

    def start_reduction(self) -> None:
        """The last gradients of the step have been collected."""

    def continue_reduction(self) -> None:
        """Another store has begun to reduce: begin what comes second, if anything does. Nothing if it has begun."""

    def finish_reduction(self) -> None:
        """Wait until gradients are summed over the replicas."""

    def clear_gradients(self) -> None:
        """Forget gradients, reduced or not."""

    @property
    def masters_may_leave(self) -> bool:
        """Whether the model computes with other tensors than the masters, whose memory may be released meanwhile."""

    def start_refresh(self, weights: Tensor | None = None) -> None:
        """Master weights have changed; from its next call on every module computes with the new ones.

        Args:
            weights: the only master in the dtype of the model, where it is elsewhere; it may be kept.
        """

    def wait_for_weights(self) -> None:
        """Complete `start_refresh`, before a module with these parameters runs; nearly free where it is complete."""

    def synchronize(self) -> None:
        """Every parameter of the model is whole and current."""
