"""What to change where memory does not suffice: changes of the configuration that leave the loss as it is.

What a change frees is read off a measured peak, what it costs off the times of the same step. A change is proposed only
if the configuration with it is legal.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from moe_memory.measure import Owner, Peak
from moe_memory.unit_choice import DISCARDED, FULL, OFFLOAD_UNITS, RERUN, entries_of
from moe_parallel.layout import ParallelLayout
from moe_parallel.pipeline.schedule import Pass
from moe_train.config.checks import cross_problems, layout_of, section_problems
from moe_train.config.explain import diff
from moe_train.config.toml import toml_value
from moe_train.config.tree import TrainConfig
from moe_train.models.stages import schedule_of

# A host link of 16 lanes of its fifth generation carries 50 to 55 GB/s; half of it, as neighbours share it.
HOST_LINK_BYTES_PER_SECOND = 25e9
# What costs less is not told from noise; no change outranks all others for being free.
LEAST_PERCENT = 0.1

# What a unit frees besides what is made in a scope of its name; `full` frees everything inside a layer.
_INSIDE = {"moe": {"router", "experts", "moe_act", "shared_experts", "dispatch"}}


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A change of the configuration.

    Attributes:
        settings: as they are given on the command line.
        saves_bytes: of the measured peak.
        costs_percent: of the time of a step; None if that was not measured.
        why: how the numbers come about.
    """

    settings: tuple[str, ...]
    saves_bytes: int
    costs_percent: float | None
    why: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What is known of a step.

    Attributes:
        peak: of the phase in which memory did not suffice, or in which most lived.
        other_bytes: the largest peak of phases in which no activations live and all state of the optimizer does.
        seconds: by scope (`moe_memory.MemoryAccount`).
        step_seconds: of the whole step; None if none was finished.
        stage: of the rank in the pipeline.
        on_device: tensors are in other memory than that of the host.
    """

    peak: Peak
    seconds: Mapping[str, float]
    step_seconds: float | None
    on_device: bool
    stage: int = 0
    other_bytes: int = 0

    def percent(self, seconds: float) -> float | None:
        """Of the step."""
        return None if not self.step_seconds else 100 * seconds / self.step_seconds

    def link_percent(self, size_bytes: float) -> float | None:
        """Of the step, for bytes that cross the host link alone."""
        return self.percent(size_bytes / HOST_LINK_BYTES_PER_SECOND)


def ranked(config: TrainConfig, world: int, measured: Measured, *, least_bytes: int = 0) -> list[Proposal]:
    """Every legal proposal, those that free the most for each percent of time first.

    Those of unknown cost come behind those of known cost, and behind both those that free less than `least_bytes`.
    """
    found = []
    for changed, saves, costs, why in _changes(config, layout_of(config, world), measured):
        if saves > 0 and not section_problems(changed) and not cross_problems(changed, world):
            settings = tuple(f"{change.key}={toml_value(change.right)}" for change in diff(config, changed))
            found.append(Proposal(settings=settings, saves_bytes=saves, costs_percent=costs, why=why))

    def rank(proposal: Proposal) -> tuple[bool, bool, float]:
        costs = proposal.costs_percent
        worth = proposal.saves_bytes if costs is None else proposal.saves_bytes / max(costs, LEAST_PERCENT)
        return proposal.saves_bytes < least_bytes, costs is None, -worth

    return sorted(found, key=rank)


_Change = tuple[TrainConfig, int, float | None, str]


def _changes(config: TrainConfig, layout: ParallelLayout, measured: Measured) -> Iterator[_Change]:
    others = [_recompute(config, layout, measured), _microbatch(config, layout, measured)]
    if measured.on_device:
        others.append(_offload(config, measured))
    for changed, saves, costs, why in chain.from_iterable(others):
        # An update needs as much as before.
        yield changed, min(saves, measured.peak.total_bytes - measured.other_bytes), costs, why
    yield from _sharding(config, layout, measured)


def _recompute(config: TrainConfig, layout: ParallelLayout, measured: Measured) -> Iterator[_Change]:
    entries = entries_of(config.memory.recompute)
    waiting = min(_waiting(config, layout, measured.stage))
    for unit in (*DISCARDED, *RERUN):
        if unit in entries:
            continue
        freed = _by_layer(measured.peak.owners, None if unit == FULL else {unit, *_INSIDE.get(unit, ())})
        # One layer is whole while its backward runs, of one microbatch of all that wait.
        saves = sum(freed.values()) - max(freed.values(), default=0) // waiting
        seconds = sum(measured.seconds.get(f"{layer}.{'rest' if unit == FULL else unit}", 0.0) for layer in freed)
        why = (
            f"freed behind the forward of {len(freed)} layers and made again in their backward, one at a time; "
            f"the forward of these parts took {seconds:.3g} s"
        )
        chosen: Any = FULL if unit == FULL else (*entries, unit)
        yield _with(config, "memory", recompute=chosen), saves, measured.percent(seconds), why


def _offload(config: TrainConfig, measured: Measured) -> Iterator[_Change]:
    for unit in OFFLOAD_UNITS:
        if unit in config.memory.offload:
            continue
        inputs: dict[str, int] = {}
        for (name, elements), size_bytes in measured.peak.idle.items():
            if name.endswith(f".{unit}") and elements >= config.memory.offload_min_elements:
                inputs[name] = inputs.get(name, 0) + size_bytes
        leaving = sorted(inputs.values())[: max(len(inputs) - config.memory.offload_keep_layers, 0)]
        saves = int(sum(leaving) * config.memory.offload_fraction)
        why = f"inputs of {len(leaving)} layers wait in host memory; if nothing hides the copies, both ways at 25 GB/s"
        changed = _with(config, "memory", offload=(*config.memory.offload, unit))
        yield changed, saves, measured.link_percent(2 * saves), why
    if config.optim.offload == "none":
        saves = measured.peak.classes()["optimizer"]
        why = "master weights and moments wait in host memory between updates; the copies alone, both ways at 25 GB/s"
        yield _with(config, "optim", offload="state"), saves, measured.link_percent(2 * saves), why


def _microbatch(config: TrainConfig, layout: ParallelLayout, measured: Measured) -> Iterator[_Change]:
    size = min(config.train.microbatch_sequences, _sequences(config, layout))
    if size == 1 or config.parallel.dynamic_cp_tokens is not None or _tokens_compete(config):
        return
    changed = _with(config, "train", microbatch_sequences=size // 2)
    # Of smaller microbatches more may wait for their backward.
    before, after = (sum(_waiting(which, layout, measured.stage)) for which in (config, changed))
    classes = measured.peak.classes()
    kept = classes["activations"] + classes["dispatch"]
    left = kept * (size // 2) * after // (size * before) + classes["temporary"] * (size // 2) // size
    why = "twice as many microbatches of half the tokens, and products of half the rows, which may run less well"
    yield changed, kept + classes["temporary"] - left, None, why


def _tokens_compete(config: TrainConfig) -> bool:
    """Whether what a token does depends on the others of its microbatch, and with it the loss."""
    # Not every family of models has capacities.
    capacity = getattr(config.model, "capacity", None)
    return (capacity is not None and capacity.factor is not None) or config.model.router.sinkhorn_iterations > 0


def _sequences(config: TrainConfig, layout: ParallelLayout) -> int:
    """Of a rank in a step, at most."""
    train = config.train
    return -(-train.global_batch_sequences // (train.balance_sequences * layout.dp)) * train.balance_sequences


def _waiting(config: TrainConfig, layout: ParallelLayout, stage: int) -> list[int]:
    """For each chunk of a rank of the pipeline the most microbatches that wait there for their backward at once."""
    parallel = config.parallel
    number = -(-_sequences(config, layout) // config.train.microbatch_sequences)
    if parallel.dynamic_cp_tokens is not None:
        number = layout.pp
    waiting, most = [0] * parallel.vpp, [1] * parallel.vpp
    for action in schedule_of(parallel).order(layout.pp, stage, number, parallel.vpp):
        waiting[action.chunk] += (action.what is Pass.FORWARD) - (action.what in (Pass.BACKWARD, Pass.WEIGHT))
        most[action.chunk] = max(most[action.chunk], waiting[action.chunk])
    return most


def _sharding(config: TrainConfig, layout: ParallelLayout, measured: Measured) -> Iterator[_Change]:
    replicas = min(layout.cp * layout.dp, layout.edp)
    if config.memory.data_parallel == "zero1" and replicas > 1:
        classes = measured.peak.classes()
        saves = (classes["parameters"] + classes["gradients"]) * (replicas - 1) // replicas
        why = f"weights and gradients are cut over at least {replicas} ranks, and gathered in every pass over a layer"
        yield _with(config, "memory", data_parallel="fsdp"), saves, None, why


def _by_layer(owners: Mapping[Owner, int], parts: Collection[str] | None) -> dict[str, int]:
    """What these parts of each layer keep for the backward; None are all parts."""
    found: dict[str, int] = {}
    for owner, size_bytes in owners.items():
        words = owner.name.split(".", 2)
        inside = len(words) == 3 and words[2] != "output" and owner.kind in ("activations", "dispatch")
        if inside and (parts is None or words[2] in parts):
            layer = ".".join(words[:2])
            found[layer] = found.get(layer, 0) + size_bytes
    return found


def _with(config: TrainConfig, section: str, **values: Any) -> TrainConfig:
    changed: TrainConfig = replace(config, **{section: replace(getattr(config, section), **values)})
    return changed
