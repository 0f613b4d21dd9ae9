"""What every engine checks: which parameters it can own, and in which order it is called."""

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from moe_memory.errors import MoeMemoryError
from moe_parallel import Groups, ShardSpec, local_box


def check_parameters(
    parameters: Mapping[str, nn.Parameter], specs: Mapping[str, ShardSpec], groups: Groups
) -> torch.device:
    """The device of all parameters, if an engine can own them.

    Raises:
        MoeMemoryError: names, shapes, devices or `requires_grad` do not fit, or a gradient is to be summed over ranks
            that hold different parts.
    """
    if parameters.keys() != specs.keys():
        different = sorted(parameters.keys() ^ specs.keys())
        raise MoeMemoryError(f"parameters and specs must have the same names; they differ in {', '.join(different)}")
    if not parameters:
        raise MoeMemoryError("the model has no parameters, so there is nothing to train")
    for name, parameter in parameters.items():
        spec = specs[name]
        if spec.name != name:
            raise MoeMemoryError(
                f"the spec of the parameter {name} calls it {spec.name}; patterns and seeds go by that"
            )
        if parameter.is_meta:
            raise MoeMemoryError(f"the parameter {name} is on the meta device; moe_parallel.apply_plan gives it memory")
        shape, expected = tuple(parameter.shape), local_box(spec, groups).shape
        if shape != expected:
            raise MoeMemoryError(
                f"the parameter {name} has shape {shape} here; its spec, {spec.shape} globally, leaves {expected} to "
                f"this rank"
            )
        if not parameter.requires_grad:
            raise MoeMemoryError(f"the parameter {name} requires no gradient; engines train every parameter")
        alike = spec.copy_axes
        wrong = [axis for axis in spec.grad_sum_axes if axis not in alike]
        if wrong:
            raise MoeMemoryError(
                f"the spec of {name} sums its gradient over {', '.join(wrong)}; it may name axes of its view that do "
                f"not split the parameter and are not summed over in any case: {', '.join(alike) or 'none'} here"
            )
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        raise MoeMemoryError(f"all parameters must be on one device; they are on {', '.join(map(str, devices))}")
    return devices.pop()


def check_in_place(name: str, weights: Tensor, owned: Tensor) -> None:
    """Refuse a step whose updates the model would not see.

    Raises:
        MoeMemoryError: the weights are in other memory than the engine's.
    """
    if weights.untyped_storage() is not owned.untyped_storage():
        raise MoeMemoryError(
            f"the weights of {name} have been moved or cast since wrap(), so that no update reaches them; model.to() "
            "comes before wrap()"
        )


class StepOrder:
    """The order of calls within a step: every gradient is reported, then `finish`, then a use of them.

    Args:
        names: of all parameters.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = dict.fromkeys(names)  # ordered, and quick to look up
        self.begin()

    def begin(self) -> None:
        """A new step: all gradients are to come."""
        self._open = set(self._names)
        self._finished = False

    def report(self, names: Collection[str], *, last: bool, has_gradient: Callable[[str], bool]) -> None:
        """Gradients of one backward; nothing is taken note of if any of them is wrong."""
        unknown = [name for name in names if name not in self._names]
        if unknown:
            raise MoeMemoryError(f"this engine owns no parameters named {', '.join(unknown)}")
        closed = [name for name in names if name not in self._open]
        if closed:
            raise MoeMemoryError(
                f"gradients of {', '.join(closed)} come after their last of this step; step() or skip() begins another"
            )
        absent = [name for name in names if not has_gradient(name)]
        if absent:
            raise MoeMemoryError(
                f"this backward gave no gradient for {', '.join(absent)}; where there is no effect it must be zero"
            )
        if last:
            self._open.difference_update(names)

    def is_open(self, names: Iterable[str]) -> bool:
        """Whether the last gradient of any of these is to come."""
        return not self._open.isdisjoint(names)

    def finish(self) -> None:
        if self._finished:
            raise MoeMemoryError("finish() was called before in this step; step() or skip() begins another")
        if self._open:
            missing = [name for name in self._names if name in self._open]
            raise MoeMemoryError(f"the last gradients of {', '.join(missing)} were not reported with grads_ready()")
        self._finished = True

    def require_finished(self) -> None:
        if not self._finished:
            raise MoeMemoryError(
                "the gradients of this step are not complete: finish() comes after the last grads_ready()"
            )


def updates_from(values: Mapping[str, int | float]) -> int:
    """The update counter of a saved engine state."""
    updates = values.get("updates")
    if set(values) != {"updates"} or not isinstance(updates, int) or updates < 0:
        raise MoeMemoryError(f"the saved engine state is {dict(values)}, expected {{'updates': a count}}")
    return updates
