"""Initial values that depend on the seed, a parameter's global name and its global shape, and on nothing else.

Numbers are drawn unit by unit, each from a generator of its own, so that a rank can draw the units it holds without
drawing the others: a unit is one expert of a stacked expert parameter, or a block of rows of any other. Draws are in
float32 on the CPU and cast, so that layouts, devices and compute dtypes agree.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from math import prod

import torch
from torch import Tensor, nn

from moe_memory.errors import MoeMemoryError
from moe_parallel import AxisGroups, Box, Groups, ParameterKind, ShardSpec, local_box

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
    model: nn.Module,
    specs: Mapping[str, ShardSpec],
    rules: Sequence[tuple[str, InitRule]],
    seed: int,
    groups: Groups | None = None,
) -> None:
    """Fill every parameter of the model in place; torch's global random state is neither read nor changed.

    Args:
        specs: of the whole model by global name; names and shapes seed the draws.
        rules: (pattern of global names, rule); the first match wins.
        seed: of the run.
        groups: of this rank, which holds `moe_parallel.local_box` of every spec and draws nothing else; None for the
            world of one process.

    Raises:
        MoeMemoryError: a parameter without spec, rule or memory, or of another name or shape than its spec leaves to
            this rank, or a rule that no parameter reaches; nothing was filled.
    """
    parameters = dict(model.named_parameters())
    missing = [name for name in parameters if name not in specs]
    if missing:
        raise MoeMemoryError(f"no spec for the parameters {', '.join(missing)}")
    renamed = [f"{name} ({specs[name].name})" for name in parameters if specs[name].name != name]
    if renamed:
        raise MoeMemoryError(f"names seed the draws, and specs call these parameters otherwise: {', '.join(renamed)}")
    empty = [name for name, parameter in parameters.items() if parameter.is_meta]
    if empty:
        raise MoeMemoryError(
            f"the parameters {', '.join(empty)} are on the meta device, where nothing can be filled; "
            f"moe_parallel.apply_plan gives them memory"
        )
    boxes = {name: local_box(specs[name], groups or AxisGroups()) for name in parameters}
    for name, parameter in parameters.items():
        if tuple(parameter.shape) != boxes[name].shape:
            raise MoeMemoryError(
                f"the parameter {name} has shape {tuple(parameter.shape)} here; its spec, {specs[name].shape} "
                f"globally, leaves {boxes[name].shape} to this rank"
            )
    # Of the whole model, of which this rank may hold some layers only.
    chosen = _first_matches(specs, rules)
    unreached = [pattern for index, (pattern, _) in enumerate(rules) if index not in chosen.values()]
    if unreached:
        raise MoeMemoryError(
            f"the initial-value patterns {', '.join(map(repr, unreached))} reach no parameter; "
            f"parameters are {', '.join(specs)}"
        )
    for name, parameter in parameters.items():
        _, rule = rules[chosen[name]]
        for rows, values in draw(specs[name], boxes[name], rule, seed):
            parameter[rows].copy_(values)


def draw(spec: ShardSpec, box: Box, rule: InitRule, seed: int) -> Iterator[tuple[tuple[int | slice, ...], Tensor]]:
    """Initial values of a box of a parameter, in pieces: (index in the box, float32 values on the CPU).

    Only the units that the box touches are drawn, one at a time; a unit is one expert, or a block of rows, of at most
    16 M elements unless a single row has more.
    """
    if not spec.shape:
        values = torch.empty((), dtype=torch.float32, device="cpu")
        rule(values, _generator(seed, spec.name, 0))
        yield (), values
        return
    if spec.kind is ParameterKind.EXPERT or len(spec.shape) == 1:
        step = 1 if spec.kind is ParameterKind.EXPERT else _UNIT_ELEMENTS
        yield from _draw_units(spec.name, spec.shape, box, step, rule, seed)
        return
    # Every dim but the last counts rows: a parameter [2, F, D] is drawn as [2F, D] is, and so in blocks.
    flat, step = (prod(spec.shape[:-1]), spec.shape[-1]), max(_UNIT_ELEMENTS // max(spec.shape[-1], 1), 1)
    for place in product(*map(range, box.shape[:-2])):
        first_row = 0
        for start, inside, size in zip(box.offset, (*place, 0), spec.shape[:-1], strict=False):
            first_row = first_row * size + start + inside
        matrix = Box((first_row, box.offset[-1]), box.shape[-2:])
        for index, values in _draw_units(spec.name, flat, matrix, step, rule, seed):
            yield (*place, *index), values


def _draw_units(
    name: str, shape: tuple[int, ...], box: Box, step: int, rule: InitRule, seed: int
) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """Units of `step` entries of the first dim."""
    first, last = box.offset[0], box.offset[0] + box.shape[0]
    columns = tuple(slice(start, start + size) for start, size in zip(box.offset[1:], box.shape[1:], strict=True))
    for unit in range(first // step, -(-last // step) if prod(box.shape) else 0):
        start, stop = unit * step, min((unit + 1) * step, shape[0])
        values = torch.empty((stop - start, *shape[1:]), dtype=torch.float32, device="cpu")
        rule(values, _generator(seed, name, unit))
        low, high = max(start, first), min(stop, last)
        yield (slice(low - first, high - first),), values[(slice(low - start, high - start), *columns)]


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


def _generator(seed: int, name: str, unit: int) -> torch.Generator:
    # torch's CPU generator keeps 32 bits of a seed. Counted from a hash of the name, units of one parameter are sure to
    # differ; with a hash each, two experts of one tensor would be equal in one of a thousand large models.
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest()
    return torch.Generator(device="cpu").manual_seed((int.from_bytes(digest, "little") + unit) % 2**32)
