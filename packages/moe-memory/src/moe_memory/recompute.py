"""Recompute: keep the input of a unit, run its forward again in the backward pass, and repeat its decisions.

A unit is a function whose first argument is a `Replay`. What must not be computed twice (the choices of a router, the
plan of a dispatch) it remembers there in the first pass and recalls in the second, so that a near-tie cannot flip and
no metadata is exchanged again. What it returns (router statistics) is that of the first pass.
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

T = TypeVar("T")


class Replay:
    """What one forward of one unit decided. It lives as long as the autograd graph of that forward."""

    def __init__(self) -> None:
        self._memory: dict[str, Any] = {}

    def recall(self, name: str) -> Any:
        """What was remembered under the name; None in the first pass."""
        return self._memory.get(name)

    def remember(self, name: str, value: Any) -> None:
        """Keep a decision for the second pass: something without gradient. The first value stays."""
        self._memory.setdefault(name, value)


class ActivationPolicy(Protocol):
    """What happens to the activations of a unit between its forward and its backward; the seam of the policies."""

    def run(self, unit: str, function: Callable[..., T], replay: Replay, *args: Any) -> T:
        """Call `function(replay, *args)`; `unit` is the name by which the policy may tell units apart."""


class _Keep:
    def run(self, unit: str, function: Callable[..., T], replay: Replay, *args: Any) -> T:
        return function(replay, *args)


class _Recompute:
    def run(self, unit: str, function: Callable[..., T], replay: Replay, *args: Any) -> T:
        if not torch.is_grad_enabled():
            return function(replay, *args)
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
