"""Apply a plan to a plain model: every rank keeps its part of the parameters, and modules get their edges."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from moe_parallel.errors import MoeParallelError
from moe_parallel.groups import Groups
from moe_parallel.plan import PlanRule, local_box, shard_specs
from moe_parallel.sharding import Box, ShardSpec
from moe_parallel.styles import Style


@dataclass(frozen=True, kw_only=True)
class ModuleRule:
    """What is done to the modules whose name matches.

    Attributes:
        pattern: of names as of `named_modules`, as of `fnmatch`; `.` in a pattern is a dot, `*` any characters.
        style: makes the module for this place.
    """

    pattern: str
    style: Style


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """How a model is spread over ranks, as data.

    Attributes:
        parameters: the first rule that matches wins; without one a parameter is dense and whole on every rank.
        modules: all rules that match are applied, in this order.
    """

    parameters: tuple[PlanRule, ...] = ()
    modules: tuple[ModuleRule, ...] = ()


def apply_plan(
    model: nn.Module,
    plan: ParallelPlan,
    groups: Groups,
    *,
    device: torch.device | None = None,
    keep: Callable[[], None] = lambda: None,
) -> dict[str, ShardSpec]:
    """Turn a model with whole parameters into this rank's part of it, in place; returns the specs by global name, of
    all parameters of the whole model.

    Parameters without storage (`without_storage`) get uninitialised storage for the part alone, so that the whole never
    exists; others keep the values of their part.

    Args:
        device: of the parameters and buffers afterwards; None leaves those with storage where they are.
        keep: drops the modules that this rank has no part in, such as other stages of a pipeline; called when patterns
            have been matched, and before anything gets storage.

    Raises:
        MoeParallelError: a pattern that matches nothing, a dim that cannot be split, a style that takes the place of a
            module with a boundary, a style or `keep` that changes the names of parameters, or a buffer without storage,
            whose value nobody knows.
    """
    specs = shard_specs(model, plan.parameters)
    _apply_styles(model, plan.modules, groups)
    other = dict(model.named_parameters()).keys() ^ specs.keys()
    if other:
        raise MoeParallelError(
            f"styles keep the names of parameters, but these have come or gone: {', '.join(sorted(other))}"
        )
    keep()
    other = dict(model.named_parameters()).keys() - specs.keys()
    if other:
        raise MoeParallelError(
            f"what is kept of a model has the names of the whole, but these are new: {', '.join(sorted(other))}; of a "
            "parameter with several names the first one counts"
        )
    boxes = {name: local_box(specs[name], groups) for name, _ in model.named_parameters()}
    _cut(model, boxes, device)
    _move_buffers(model, device)
    return specs


class _Uninitialised(TorchFunctionMode):
    """Leaves out initialisation, which for parameters without storage would import torch's compiler (seconds)."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        # Those of `torch.nn.init` that are not asked about here end in `normal_`, or cost nothing.
        if function == Tensor.normal_ or getattr(function, "__module__", None) == "torch.nn.init":
            return keywords["tensor"] if "tensor" in keywords else arguments[0]
        return function(*arguments, **keywords)


@contextmanager
def without_storage() -> Iterator[None]:
    """Modules made here have the shapes of their parameters and no values (torch's meta device).

    Parameters from `torch.empty`, `torch.zeros` or `torch.nn.init` take no time; from `torch.randn` they still import
    torch's compiler.
    """
    with torch.device("meta"), _Uninitialised():
        yield


def _apply_styles(model: nn.Module, rules: Sequence[ModuleRule], groups: Groups) -> None:
    kept: set[nn.Module] = set()
    for rule in rules:
        # A module may have several names; a style sees it once, and what takes its place has them all.
        names: dict[nn.Module, list[str]] = {}
        for name, module in list(model.named_modules(remove_duplicate=False)):
            if name:
                names.setdefault(module, []).append(name)
        matching = [module for module, own in names.items() if any(fnmatchcase(name, rule.pattern) for name in own)]
        if not matching:
            raise MoeParallelError(f"the plan has the module pattern {rule.pattern!r}, which matches no module")
        for module in matching:
            changed = rule.style(module, groups)
            if changed is module:
                kept.add(module)
                continue
            if module in kept:
                raise MoeParallelError(
                    f"the plan puts another module in the place of {names[module][0]}, whose boundary would be lost; "
                    f"move the rule {rule.pattern!r} before those that keep the module"
                )
            changed.train(module.training)
            for name in names[module]:
                _set(model, name, changed)


def _cut(model: nn.Module, boxes: dict[str, Box], device: torch.device | None) -> None:
    kept: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        kept[parameter] = _part(parameter, boxes[name], device)
    # Under every name that a parameter has, so that what is tied stays tied.
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        _set(model, name, kept[parameter])


def _move_buffers(model: nn.Module, device: torch.device | None) -> None:
    moved: dict[Tensor, Tensor] = {}
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if buffer.is_meta:
            raise MoeParallelError(f"the buffer {name} has no storage, so its value is lost; make it on a real device")
        if device is not None:
            _set(model, name, moved.setdefault(buffer, buffer.to(device)))


def _part(parameter: nn.Parameter, box: Box, device: torch.device | None) -> nn.Parameter:
    if parameter.is_meta:
        values = torch.empty(box.shape, dtype=parameter.dtype, device=device or "cpu")
    elif tuple(parameter.shape) == box.shape and device in (None, parameter.device):
        return parameter
    else:
        index = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
        values = parameter.detach()[index].to(device, copy=True)
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _set(model: nn.Module, name: str, value: nn.Module | Tensor) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, value)
