"""Records: what a run reports. Frozen, plain numbers, one line of JSON each."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, ClassVar

# The fields that may differ between runs that are bitwise equal.
WALL_CLOCK_FIELDS = frozenset(
    {"step_seconds", "tokens_per_second", "flops_per_second", "memory_peak_bytes", "eta_seconds"}
)


@dataclass(frozen=True, kw_only=True)
class StepTraffic:
    """What the dispatchers of all ranks did in one step; `moe_train.observe.metrics` has the meaning of every field."""

    network_bytes: int
    node_bytes: int
    self_bytes: int
    metadata_bytes: int
    collectives: int
    host_syncs: int
    peak_buffer_bytes: int

    @classmethod
    def from_numbers(cls, numbers: Sequence[int]) -> "StepTraffic":
        """Of the fields in their order."""
        return cls(**{field.name: number for field, number in zip(fields(cls), numbers, strict=True)})


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step; `moe_train.observe.metrics` has the meaning of every field. `step` counts from 1.

    Fields of `comm` are written as `comm/network_bytes` and so on.
    """

    kind: ClassVar[str] = "step"

    step: int
    loss: float
    lr: float
    gnorm: float
    balance: float
    dead: int
    num_experts: int
    drop: int
    aux_loss: float
    seq_loss: float
    global_loss: float
    z_loss: float
    mtp_loss: float
    tokens: int
    skipped: bool
    step_seconds: float
    tokens_per_second: float
    flops_per_second: float
    work_balance: float
    memory_peak_bytes: int
    eta_seconds: float
    comm: StepTraffic

    def to_json(self) -> str:
        return _line(self)


@dataclass(frozen=True, kw_only=True)
class ValidRecord:
    """One validation, after `step` steps."""

    kind: ClassVar[str] = "valid"

    step: int
    valid_loss: float
    valid_bits_per_byte: float

    def to_json(self) -> str:
        return _line(self)


@dataclass(frozen=True, kw_only=True)
class LoadRecord:
    """Expert load of one step: `counts[layer][expert]` choices by valid tokens."""

    kind: ClassVar[str] = "load"

    step: int
    counts: list[list[int]]

    def to_json(self) -> str:
        return _line(self)


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """The peak of one phase on one rank.

    Attributes:
        process_bytes: of the device or process, everything included.
        tensor_bytes: of tensors.
        classes: these by class (`moe_memory.MemoryAccount`).
        owners: these by unit of the layers or other owner, as class, owner and bytes, the largest first.
    """

    process_bytes: int
    tensor_bytes: int
    classes: Mapping[str, int]
    owners: Sequence[Sequence[str | int]]


@dataclass(frozen=True, kw_only=True)
class MemoryRecord:
    """Peak memory by phase and class: of a step, or before the first one that this process ran, of building.

    Attributes:
        source: what `process_bytes` are.
        rank: with the most in tensors, of which the phases are.
        rank_bytes: largest peak of tensors of every rank.
    """

    kind: ClassVar[str] = "memory"

    step: int
    source: str
    rank: int
    phases: Mapping[str, PhaseMemory]
    rank_bytes: Sequence[int]

    def to_json(self) -> str:
        return json.dumps({"record": self.kind, **asdict(self)}, separators=(",", ":"))


Record = StepRecord | ValidRecord | LoadRecord | MemoryRecord


def _line(record: Record) -> str:
    # JSON has no NaN and no infinity: a number that is not finite becomes null.
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in _flat(record).items()
    }
    return json.dumps({"record": record.kind, **finite}, allow_nan=False, separators=(",", ":"))


def _flat(record: Any, prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        values |= _flat(value, f"{field.name}/") if is_dataclass(value) else {prefix + field.name: value}
    return values
