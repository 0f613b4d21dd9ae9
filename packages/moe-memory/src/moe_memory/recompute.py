"""Recompute: keep the input of a unit, run its forward again in the backward pass, and repeat its decisions.

A model names its units and says what they read and make; which of them are recomputed, and how, is a policy's business.

A unit is a function whose first argument is a `Replay`. What must not be computed twice (the choices of a router, the
plan of a dispatch) it remembers there in the first pass and recalls in the second, so that a near-tie cannot flip and
no metadata is exchanged again. What it returns (router statistics) is that of the first pass. Torch's global random
state is repeated; a generator of its own is not, so a unit remembers what it drew from one, or draws by counter.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe_memory.errors import MoeMemoryError
from moe_memory.measure.account import MemoryClass, open_account, timed, within
from moe_memory.recompute_outputs import discard_outputs
from moe_memory.unit_choice import FULL, RECOMPUTE_UNITS, check_entries, entries_of, is_named

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

    Values and gradients are those of the plain call. Units are called by their layer and what they are of it,
    `layers.3.core_attn`; a whole layer is its unit `layers.3.full`.
    """

    def run(self, unit: str, function: Callable[..., T], replay: Replay, *args: Any) -> T:
        """Call `function(replay, *args)`. The policy may call it again in the backward pass, with the same replay and
        the random state of the first call; it returns what the first call returned."""

    def consumed(
        self, unit: str, outputs: Sequence[Tensor], before: Tensor, again: Callable[..., Any], *kept: Tensor
    ) -> None:
        """Outputs of a unit have been consumed: only the backward of what made `before` of them reads them again.

        That begins with the gradient of `before`, and until then the policy may do without their values. `again(*kept)`
        returns them anew, in their order and with their strides; it draws no random numbers, and runs without gradient.
        """

    def idle(self, unit: str, tensors: Sequence[Tensor], before: Tensor) -> None:
        """Inputs of a unit that nobody reads until the gradient of `before` is there. Units are those of offload."""

    def forward(self) -> AbstractContextManager[object]:
        """For one forward of a stage on one microbatch: to be entered around each of its layers, one after another."""


class _Keep:
    def run(self, unit: str, function: Callable[..., T], replay: Replay, *args: Any) -> T:
        return function(replay, *args)

    def consumed(
        self, unit: str, outputs: Sequence[Tensor], before: Tensor, again: Callable[..., Any], *kept: Tensor
    ) -> None:
        """They stay."""

    def idle(self, unit: str, tensors: Sequence[Tensor], before: Tensor) -> None:
        """They stay."""

    def forward(self) -> AbstractContextManager[object]:
        return nullcontext()


class UnitRecompute(_Keep):
    """Recomputes the units of a list, such as `("moe_act", "mlp@layers.0")`; see `moe_memory.unit_choice`."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = tuple(entries)

    def run(self, unit: str, function: Callable[..., T], replay: Replay, *args: Any) -> T:
        if not is_named(self._entries, unit):
            return function(replay, *args)
        result: T = checkpoint(function, replay, *args, use_reentrant=False, preserve_rng_state=True)
        return result

    def consumed(
        self, unit: str, outputs: Sequence[Tensor], before: Tensor, again: Callable[..., Any], *kept: Tensor
    ) -> None:
        if is_named(self._entries, unit):
            discard_outputs(outputs, before, again, kept)


KEEP: ActivationPolicy = _Keep()
RECOMPUTE: ActivationPolicy = UnitRecompute((FULL,))


def activation_policy(recompute: str | Sequence[str]) -> ActivationPolicy:
    """The policy that `memory.recompute` means.

    Raises:
        MoeMemoryError: it names what is no unit.
    """
    entries = entries_of(recompute)
    check_entries("memory.recompute", entries, RECOMPUTE_UNITS)
    if not entries:
        return KEEP
    return RECOMPUTE if entries == (FULL,) else UnitRecompute(entries)


def run_unit(policy: ActivationPolicy, layer: str, function: Callable[..., T], *args: Any) -> T:
    """Run a whole layer, `function(replay, *args)`, under a policy, with a replay of its own.

    In an account of memory, what the layer returns is its `output`, and what no unit inside claims is its `rest`.
    """
    accounted = _accounted(f"{layer}.rest", function, output=f"{layer}.output")
    return policy.run(f"{layer}.{FULL}", accounted, Replay(), *args)


def _accounted(name: str, function: Callable[..., T], output: str | None = None) -> Callable[..., T]:
    """The function, whose activations have this name in the account of memory that is open.

    What it returns has a name of its own, or is of the scope around.
    """
    account = open_account()
    if account is None:
        return function

    def run(*args: Any) -> T:
        with account.within(name):
            result = function(*args)
        account.hand_on(result, output)
        return result

    return run


@dataclass(frozen=True)
class LayerUnits:
    """The units of one layer, for the modules that it is made of.

    Attributes:
        policy: of the model.
        layer: its name, `layers.3` or `mtp.0`.
    """

    policy: ActivationPolicy = KEEP
    layer: str = ""

    def run(self, unit: str, function: Callable[..., T], *args: Any, replay: Replay | None = None) -> T:
        """Call `function(replay, *args)`, a part of the layer; with the replay of the layer, if it decides anything."""
        name = f"{self.layer}.{unit}"
        return self.policy.run(name, _accounted(name, function), replay or Replay(), *args)

    def within(self, name: str, kind: MemoryClass = "activations") -> AbstractContextManager[None]:
        """What is made here is called so in an account of memory."""
        return within(f"{self.layer}.{name}", kind)

    def making(self, unit: str) -> AbstractContextManager[None]:
        """Outputs of a unit are made here; what they are says `consumed`."""
        return timed(f"{self.layer}.{unit}")

    def consumed(
        self, unit: str, outputs: Sequence[Tensor], before: Tensor, again: Callable[..., Any], *kept: Tensor
    ) -> None:
        """See `ActivationPolicy`."""
        name = f"{self.layer}.{unit}"
        if (account := open_account()) is not None:
            account.claim(outputs, name)
        self.policy.consumed(name, outputs, before, again, *kept)

    def idle(self, unit: str, tensors: Sequence[Tensor], before: Tensor) -> None:
        """See `ActivationPolicy`."""
        name = f"{self.layer}.{unit}"
        if (account := open_account()) is not None:
            account.idle(tensors, name)
        self.policy.idle(name, tensors, before)


# Those of a layer that stands alone.
KEPT_UNITS = LayerUnits()
