"""Recompute: keep the input of a unit, run its forward again in the backward pass, and repeat its decisions.

A unit is a function whose first argument is a `Replay`. What must not be computed twice (the choices of a router, the
plan of a dispatch) it remembers there in the first pass and recalls in the second, so that a near-tie cannot flip and
no metadata is exchanged again. What it returns (router statistics) is that of the first pass. Torch's global random
state is repeated; a generator of its own is not, so a unit remembers what it drew from one, or draws by counter.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_memory.errors import MoeMemoryError

T = TypeVar("T")


class Replay:
    """What one forward of one unit decided. It lives as long as the autograd graph of that forward.

    `once` is for a decision that stands alone; `recall` and `remember` are for one that is made in the middle of work
    which the second pass has to repeat (choices among scores that need a gradient).
    """

    def __init__(self) -> None:
        self._memory: dict[str, Any] = {}

    def once(self, name: str, compute: Callable[[], T]) -> T:
        """The value of `compute()`, which is called in the first pass only, and without gradient in any case.

        So it leaves nothing in the graph that the second pass would have to save again.
        """
        if name not in self._memory:
            with torch.no_grad():
                self.remember(name, compute())
        value: T = self._memory[name]
        return value

    def recall(self, name: str) -> Any:
        """What was remembered under the name; None in the first pass."""
        return self._memory.get(name)

    def remember(self, name: str, value: Any) -> None:
        """Keep a decision for the second pass; the first value stays.

        Raises:
            MoeMemoryError: a tensor that requires a gradient; its graph is that of the first pass, which is discarded.
        """
        if isinstance(value, Tensor) and value.requires_grad:
            raise MoeMemoryError(
                f"{name!r} requires a gradient and cannot be remembered; detach it, or compute it twice"
            )
        self._memory.setdefault(name, value)


class ActivationPolicy(Protocol):
    """What happens to the activations of a unit between its forward and its backward; the seam of the policies.

    Values and gradients are those of the plain call. A policy may call the function again in the backward pass, with
    the same replay and the random state of the first call; it returns what the first call returned.
    """

    def run(self, unit: str, function: Callable[..., T], replay: Replay, *args: Any) -> T:
        """Call `function(replay, *args)`; `unit` is the name by which the policy may tell units apart."""


class _Keep:
    def run(self, unit: str, function: Callable[..., T], replay: Replay, *args: Any) -> T:
        return function(replay, *args)


class _Recompute:
    def run(self, unit: str, function: Callable[..., T], replay: Replay, *args: Any) -> T:
        result: T = checkpoint(function, replay, *args, use_reentrant=False, preserve_rng_state=True)
        return result


KEEP: ActivationPolicy = _Keep()
RECOMPUTE: ActivationPolicy = _Recompute()


def activation_policy(recompute: Literal["none", "full"]) -> ActivationPolicy:
    """The policy that the configuration names."""
    return {"none": KEEP, "full": RECOMPUTE}[recompute]


def run_unit(policy: ActivationPolicy, unit: str, function: Callable[..., T], *args: Any) -> T:
    """Run `function(replay, *args)` under a policy, with a replay of its own."""
    return policy.run(unit, function, Replay(), *args)
