"""Which units of which layers a list of the configuration means. Imports nothing heavy.

An entry is the name of a unit, for all layers that have one, or `unit@pattern` for those whose name matches: layers are
called `layers.0` and so on, those of multi-token prediction `mtp.0`. One list says both, so that layers may differ in
their units; a pattern beside the list would be the same for all of them.
"""

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from math import floor

from moe_memory.errors import MoeMemoryError
from moe_parallel.problem import Problem

FULL = "full"
# In the order of the layer. Of the first group only the outputs are made again, of the second all that is inside.
DISCARDED = ("layernorm", "mla_up_proj", "moe_act")
RERUN = ("core_attn", "mlp", "moe", "shared_experts", FULL)
RECOMPUTE_UNITS = (*DISCARDED, *RERUN)
# Modules whose input waits in host memory.
OFFLOAD_UNITS = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")
# What of these is freed by a recomputed unit, or lies in one and is made for a moment only.
_OFFLOAD_AGAINST = {
    FULL: frozenset(OFFLOAD_UNITS),
    "moe": frozenset({"expert_fc1", "moe_act"}),
    "layernorm": frozenset({"qkv_linear"}),
    "mla_up_proj": frozenset({"core_attn"}),
}
# What keeps nothing of the activations inside, so that nothing is left for these.
_INSIDE = {FULL: frozenset(RECOMPUTE_UNITS) - {FULL}, "moe": frozenset({"moe_act", "shared_experts"})}


def entries_of(recompute: str | Sequence[str]) -> tuple[str, ...]:
    """`memory.recompute` as a list of entries."""
    if isinstance(recompute, str):
        return () if recompute == "none" else (recompute,)
    return tuple(recompute)


def units_at(entries: Sequence[str], layer: str) -> frozenset[str]:
    """The units that the entries name for a layer."""
    return frozenset(unit for unit, pattern in map(_split, entries) if fnmatchcase(layer, pattern))


def is_named(entries: Sequence[str], unit: str) -> bool:
    """Whether the entries name a unit of a layer, as `layers.3.core_attn`; a whole layer is its unit `full`."""
    layer, _, name = unit.rpartition(".")
    return name in units_at(entries, layer)


def entry_problems(key: str, entries: Sequence[str], legal: Collection[str]) -> list[Problem]:
    """Units that do not exist, and entries that occur twice."""
    found = []
    for place, entry in enumerate(entries):
        unit, pattern = _split(entry)
        if unit not in legal or not pattern:
            rule = "names a unit, or unit@pattern with a pattern of layers such as layers.1*"
            found.append(Problem(key=key, value=entry, rule=rule, legal=", ".join(sorted(legal))))
        elif entry in entries[:place]:
            found.append(Problem(key=key, value=entry, rule="occurs twice; name a unit once for the same layers"))
    return found


def check_entries(key: str, entries: Sequence[str], legal: Collection[str]) -> None:
    """Refuse what would choose nothing.

    Raises:
        MoeMemoryError: `entry_problems`.
    """
    problems = entry_problems(key, entries, legal)
    if problems:
        raise MoeMemoryError("; ".join(map(str, problems)))


def layer_problems(
    key: str, entries: Sequence[str], layers: Mapping[str, Collection[str]], legal: Collection[str]
) -> list[Problem]:
    """Entries that name nothing, and units that lie in other ones, given the units of every layer."""
    found = _missing(key, entries, layers, legal)
    for layer, units in layers.items():
        chosen = units_at(entries, layer) & set(units)
        for outer in sorted(chosen & _INSIDE.keys()):
            inner = sorted(chosen & _INSIDE[outer])
            if inner:
                rule = (
                    f"includes {outer} and {', '.join(inner)} in {layer}, where {outer} keeps its input alone: the "
                    f"other would be computed once more and save nothing"
                )
                legal_units = f"{outer} without them, or patterns of other layers"
                return [*found, Problem(key=key, value=tuple(entries), rule=rule, legal=legal_units)]
    return found


def offload_problems(
    key: str, entries: Sequence[str], recompute: Sequence[str], layers: Mapping[str, Collection[str]]
) -> list[Problem]:
    """Entries that name nothing, and inputs that a recomputed unit frees already, given the units of every layer."""
    found = _missing(key, entries, layers, OFFLOAD_UNITS)
    for layer, units in layers.items():
        chosen = units_at(entries, layer) & set(units)
        for unit in sorted(units_at(recompute, layer) & _OFFLOAD_AGAINST.keys()):
            freed = sorted(chosen & _OFFLOAD_AGAINST[unit] - _kept_by(unit, layer))
            if freed:
                rule = (
                    f"includes {', '.join(freed)} in {layer}, of which nothing is kept with memory.recompute = {unit}"
                )
                return [*found, Problem(key=key, value=tuple(entries), rule=rule, legal="one of the two for a layer")]
    return found


def staying_problems(
    key: str,
    entries: Sequence[str],
    stages: Sequence[Mapping[str, Collection[str]]],
    *,
    fraction: float,
    keep: int,
) -> list[Problem]:
    """Units of which no stage has enough layers for one to leave, given the units of every layer of every stage."""
    for unit in sorted({_split(entry)[0] for entry in entries}):
        most = max(
            sum(unit in units_at(entries, layer) & set(units) for layer, units in layers.items()) for layers in stages
        )
        if not any(is_spread(number, fraction) for number in range(most - keep)):
            rule = (
                f"includes {unit}, of which nothing ever leaves: a stage has at most {most} such layers, of which "
                f"memory.offload_fraction = {fraction} are chosen and memory.offload_keep_layers = {keep} stay"
            )
            legal = "a larger fraction, fewer layers that stay, or stages of more layers"
            return [Problem(key=key, value=tuple(entries), rule=rule, legal=legal)]
    return []


def is_spread(number: int, fraction: float) -> bool:
    """Whether a layer is one of the fraction: as many of the first n are as it says, for every n."""
    return floor((number + 1) * fraction) > floor(number * fraction)


def _kept_by(unit: str, layer: str) -> frozenset[str]:
    """A whole layer keeps its input, that of its first norm; in multi-token prediction a projection comes before."""
    return frozenset({"attn_norm"} if unit == FULL and layer.startswith("layers.") else ())


def _missing(
    key: str, entries: Sequence[str], layers: Mapping[str, Collection[str]], legal: Collection[str]
) -> list[Problem]:
    found = []
    for entry in entries:
        unit, pattern = _split(entry)
        if not any(unit in units and fnmatchcase(layer, pattern) for layer, units in layers.items()):
            there = sorted({unit for units in layers.values() for unit in units if unit in legal})
            rule = "names a unit that no such layer of this model has"
            found.append(Problem(key=key, value=entry, rule=rule, legal=", ".join(there) or "none"))
    return found


def _split(entry: str) -> tuple[str, str]:
    unit, at, pattern = entry.partition("@")
    return unit, pattern if at else "*"
