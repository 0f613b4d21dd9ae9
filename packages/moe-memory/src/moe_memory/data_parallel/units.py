"""Which modules of a model are gathered at once; decided by the structure of the model, without torch's FSDP."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from moe_parallel import ParameterKind


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward; containers such as `nn.ParameterList` have none, another module reads them."""
    return type(module).forward is not nn.Module.forward


@dataclass(frozen=True)
class UnitPlan:
    """What is gathered at once.

    Attributes:
        module: whose call gathers it.
        kind: of all its parameters.
        names: global names.
        stays: whether it stays gathered from its forward to the end of the step.
    """

    module: nn.Module
    kind: ParameterKind
    names: tuple[str, ...]
    stays: bool


def find_units(model: nn.Module, shardable: Mapping[str, ParameterKind]) -> Iterator[UnitPlan]:
    """Units of a model, inner ones before those that contain them; see `Fsdp`.

    Args:
        shardable: kind by global name of the parameters that may be part of a unit.
    """
    yield from _units_below(model, "", shardable)


def _units_below(module: nn.Module, prefix: str, shardable: Mapping[str, ParameterKind]) -> Iterator[UnitPlan]:
    found = False
    for name, child in module.named_children():
        inner = f"{prefix}{name}."
        if isinstance(child, nn.ModuleList):
            parts = [
                unit
                for index, element in child.named_children()
                if is_called(element)
                for unit in _split(element, f"{inner}{index}.", shardable, stays=False)
            ]
        else:
            parts = list(_units_below(child, inner, shardable))
        found = found or bool(parts)
        yield from parts
    if not found and is_called(module):
        dims = {f"{prefix}{name}": parameter.ndim for name, parameter in module.named_parameters()}
        large = {name: kind for name, kind in shardable.items() if dims.get(name, 0) > 1}
        yield from _split(module, prefix, large, stays=True)


def _split(
    module: nn.Module, prefix: str, shardable: Mapping[str, ParameterKind], *, stays: bool
) -> Iterator[UnitPlan]:
    """A unit, after those of its sub-modules that have experts only."""
    names = [f"{prefix}{name}" for name, _ in module.named_parameters()]
    kinds = {name: shardable[name] for name in names if name in shardable}
    if set(kinds.values()) == {ParameterKind.DENSE, ParameterKind.EXPERT}:
        for name, child in module.named_children():
            yield from _expert_parts(child, f"{prefix}{name}.", shardable, stays=stays)
        kinds = {name: kind for name, kind in kinds.items() if kind is ParameterKind.DENSE}
    if kinds:
        yield UnitPlan(module, next(iter(kinds.values())), tuple(kinds), stays)


def _expert_parts(
    module: nn.Module, prefix: str, shardable: Mapping[str, ParameterKind], *, stays: bool
) -> Iterator[UnitPlan]:
    names = [f"{prefix}{name}" for name, _ in module.named_parameters()]
    kinds = {shardable[name] for name in names if name in shardable}
    if kinds == {ParameterKind.EXPERT} and is_called(module):
        yield from _split(module, prefix, shardable, stays=stays)
    elif ParameterKind.EXPERT in kinds:
        for name, child in module.named_children():
            yield from _expert_parts(child, f"{prefix}{name}.", shardable, stays=stays)
