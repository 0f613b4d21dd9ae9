"""Initial values that depend on the seed, a parameter's global name and its global shape, and on nothing else.

Numbers are drawn unit by unit, each from a generator of its own, so that a rank can draw the units it holds without
drawing the others: a unit is one expert of a stacked expert parameter, or a block of rows of any other. Draws are in
float32 on the CPU and cast, so that layouts, devices and compute dtypes agree.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from types import EllipsisType

import torch
from torch import Tensor, nn

from moe_memory.errors import MoeMemoryError
from moe_parallel import ParameterKind, ShardSpec

# Largest number of elements that are drawn from one generator.
_UNIT_ELEMENTS = 16 * 2**20

InitRule = Callable[[Tensor, torch.Generator], None]


def normal(std: float) -> InitRule:
    """Independent draws from N(0, std²)."""

    def rule(unit: Tensor, generator: torch.Generator) -> None:
        unit.normal_(0.0, std, generator=generator)

    return rule


def constant(value: float) -> InitRule:
    """The same value everywhere."""

    def rule(unit: Tensor, generator: torch.Generator) -> None:
        unit.fill_(value)

    return rule


def ones() -> InitRule:
    """One everywhere, as for norms."""
    return constant(1.0)


def zeros() -> InitRule:
    """Zero everywhere, as for biases."""
    return constant(0.0)


@torch.no_grad()
def initialise(
    model: nn.Module, specs: Mapping[str, ShardSpec], rules: Sequence[tuple[str, InitRule]], seed: int
) -> None:
    """Fill every parameter of the model in place; torch's global random state is neither read nor changed.

    Args:
        specs: by global name; names and shapes seed the draws.
        rules: (pattern of global names, rule); the first match wins.
        seed: of the run.

    Raises:
        MoeMemoryError: a parameter without spec or rule or of another shape than its spec, or a rule that no parameter
            reaches; nothing was filled.
    """
    parameters = dict(model.named_parameters())
    missing = [name for name in parameters if name not in specs]
    if missing:
        raise MoeMemoryError(f"no spec for the parameters {', '.join(missing)}")
    for name, parameter in parameters.items():
        if tuple(parameter.shape) != specs[name].shape:
            raise MoeMemoryError(
                f"the parameter {name} has shape {tuple(parameter.shape)} here and {specs[name].shape} globally; whole "
                f"parameters are needed in this release"
            )
    chosen = _first_matches(parameters, rules)
    unreached = [pattern for index, (pattern, _) in enumerate(rules) if index not in chosen.values()]
    if unreached:
        raise MoeMemoryError(
            f"the initial-value patterns {', '.join(map(repr, unreached))} reach no parameter; "
            f"parameters are {', '.join(parameters)}"
        )
    for name, parameter in parameters.items():
        _, rule = rules[chosen[name]]
        for unit, rows in enumerate(_units(specs[name])):
            values = torch.empty(parameter[rows].shape, dtype=torch.float32)
            rule(values, _generator(seed, name, unit))
            parameter[rows].copy_(values)


def _first_matches(names: Iterable[str], rules: Sequence[tuple[str, InitRule]]) -> dict[str, int]:
    """Index of the first rule that matches, by name."""
    found: dict[str, int] = {}
    unmatched = []
    for name in names:
        index = next((index for index, (pattern, _) in enumerate(rules) if fnmatchcase(name, pattern)), None)
        if index is None:
            unmatched.append(name)
        else:
            found[name] = index
    if unmatched:
        raise MoeMemoryError(
            f"no initial-value pattern matches the parameters {', '.join(unmatched)}; "
            f"patterns are {', '.join(repr(pattern) for pattern, _ in rules)}"
        )
    return found


def _units(spec: ShardSpec) -> Sequence[slice | EllipsisType]:
    """Runs of dim 0 that are drawn together."""
    if not spec.shape:
        return [...]
    step = 1 if spec.kind is ParameterKind.EXPERT else max(_UNIT_ELEMENTS // max(prod(spec.shape[1:]), 1), 1)
    return [slice(start, start + step) for start in range(0, spec.shape[0], step)]


def _generator(seed: int, name: str, unit: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{unit}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
