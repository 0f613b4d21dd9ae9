"""Records: what a run reports. Frozen, plain numbers, one line of JSON each."""

import json
import math
from dataclasses import dataclass, fields
from typing import ClassVar

# The fields that may differ between runs that are bitwise equal.
WALL_CLOCK_FIELDS = frozenset(
    {"step_seconds", "tokens_per_second", "flops_per_second", "memory_peak_bytes", "eta_seconds"}
)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step; `moe_train.observe.metrics` has the meaning of every field. `step` counts from 1."""

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


Record = StepRecord | ValidRecord | LoadRecord


def _line(record: Record) -> str:
    # JSON has no NaN and no infinity: a number that is not finite becomes null.
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    finite = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
    return json.dumps({"record": record.kind, **finite}, allow_nan=False, separators=(",", ":"))
