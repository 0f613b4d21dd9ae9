"""Structured values as tensors and the rest: a graph takes and returns tensors alone.

Tuples, lists, dictionaries and dataclasses are taken apart. Anything else but a tensor is a constant of the capture.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from moe_kernels.errors import MoeKernelsError


@dataclass(frozen=True)
class Leaf:
    """The tensor with this number."""

    number: int


@dataclass(frozen=True)
class Node:
    """A container of the type `kind`, with the structures of what is in it by key or name."""

    kind: type
    parts: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, kw_only=True)
class Flat:
    """A value taken apart.

    Attributes:
        structure: what `rebuild` needs besides tensors: `Leaf`, `Node` or a constant.
        tensors: each once, however often it occurs.
        names: of the tensors, by the way that leads to them, such as `scale.valid_T`.
    """

    structure: Any
    tensors: tuple[Tensor, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class TensorForm:
    """What is fixed of a tensor when a graph is captured; another layout in memory is copied into that of then."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    stride: tuple[int, ...] = field(compare=False)

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorForm":
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad, tensor.stride())

    def allocate(self) -> Tensor:
        """A tensor of this form in memory of its own, in the same order of dims and without gaps."""
        like = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return torch.empty_like(like, device=self.device)

    def __str__(self) -> str:
        gradient = "with" if self.requires_grad else "without"
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape} on {self.device} {gradient} gradient"


def flatten(values: Mapping[str, Any]) -> Flat:
    """Take named values apart; their names begin the names of tensors."""
    number_of: dict[int, int] = {}
    tensors: list[Tensor] = []
    names: list[str] = []

    def walk(part: Any, path: str) -> Any:
        if isinstance(part, Tensor):
            # The same object twice stays one: `Routing` knows by identity which ids were counted.
            if id(part) not in number_of:
                number_of[id(part)] = len(tensors)
                tensors.append(part)
                names.append(path)
            return Leaf(number_of[id(part)])
        if is_dataclass(part) and not isinstance(part, type):
            present = [field.name for field in fields(part) if hasattr(part, field.name)]
            return Node(type(part), tuple((key, walk(getattr(part, key), f"{path}.{key}")) for key in present))
        if type(part) in (tuple, list):
            return Node(type(part), tuple((key, walk(item, f"{path}[{key}]")) for key, item in enumerate(part)))
        if type(part) is dict:
            return Node(dict, tuple((key, walk(item, f"{path}[{key!r}]")) for key, item in part.items()))
        return part

    structure = Node(dict, tuple((name, walk(value, name)) for name, value in values.items()))
    return Flat(structure=structure, tensors=tuple(tensors), names=tuple(names))


def rebuild(structure: Any, tensors: Sequence[Tensor]) -> Any:
    """Put a value together again, with other tensors."""
    if isinstance(structure, Leaf):
        return tensors[structure.number]
    if not isinstance(structure, Node):
        return structure
    parts = {key: rebuild(part, tensors) for key, part in structure.parts}
    if structure.kind is dict:
        return parts
    if structure.kind in (tuple, list):
        return structure.kind(parts.values())
    value: Any = object.__new__(structure.kind)
    for key, part in parts.items():
        object.__setattr__(value, key, part)  # frozen ones too
    return value


def check_same_structure(found: Any, captured: Any, what: str, path: str = "") -> None:
    """Refuse a value whose containers or constants are not those of the capture.

    Raises:
        MoeKernelsError: names the first part that differs.
    """
    if isinstance(found, Node) and isinstance(captured, Node) and found.kind is captured.kind:
        keys, wanted = [key for key, _ in found.parts], [key for key, _ in captured.parts]
        if keys == wanted:
            for (key, mine), (_, other) in zip(found.parts, captured.parts, strict=True):
                check_same_structure(mine, other, what, f"{path}.{key}" if path else str(key))
            return
    elif not isinstance(found, Node) and not isinstance(captured, Node) and found == captured:
        return
    raise MoeKernelsError(
        f"{what} was captured with {path or 'arguments'} = {_named(captured)}, not {_named(found)}; "
        f"what is no tensor is a constant of the graph: pass it as a tensor, or record another step (reset)"
    )


def check_same_form(found: Tensor, captured: TensorForm, what: str, name: str) -> None:
    """Refuse a tensor of another shape, dtype, device or need of a gradient than was captured.

    Raises:
        MoeKernelsError: names the tensor.
    """
    if TensorForm.of(found) != captured:
        raise MoeKernelsError(
            f"{what} was captured with {name}: {captured}, not {TensorForm.of(found)}; a graph has one form, so pad to "
            f"it, call the function itself, or record another step (reset)"
        )


def _named(structure: Any) -> str:
    if isinstance(structure, Node):
        return f"a {structure.kind.__name__} of {[key for key, _ in structure.parts]}"
    return f"tensor {structure.number}" if isinstance(structure, Leaf) else repr(structure)
