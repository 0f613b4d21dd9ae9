"""The console: one aligned line every few steps; on a terminal also a live line for the step in progress.

step   20/200  loss 3.912  lr 3.0e-04  gnorm 1.21 | balance 1.14  dead 0/8  drop 0 | 41.2k tok/s  0.24 TF/s | ...
"""

import sys
from typing import TextIO

from moe_train.config.tree import TrainConfig
from moe_train.models.flops import ModelCosts
from moe_train.observe.notation import clock, fixed, short
from moe_train.observe.record import MemoryRecord, StepRecord, ValidRecord

LEGEND = """\
loss nats per token, lr learning rate, gnorm gradient norm | balance largest / mean expert load, dead experts idle,
drop choices that reached no expert | training speed | peak memory | time left.  More: moe-train explain NAME"""


class Console:
    """Prints records of a run to standard output.

    Lines are plain where the output is no terminal. Steps that are a multiple of `observe.log_interval_steps` are
    printed, and the first and the last one.
    """

    def __init__(
        self, config: TrainConfig, costs: ModelCosts, *, start_step: int = 0, stream: TextIO | None = None
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._steps = config.train.steps
        self._interval = config.observe.log_interval_steps
        self._first = start_step + 1
        self._live: _LiveLine | None = None
        self._line(headline(config, costs))
        self._line(LEGEND)
        if self._stream.isatty():
            self._live = _LiveLine(self._stream, self._steps, start_step)

    def step(self, record: StepRecord) -> None:
        """Show a step."""
        if record.skipped or record.step % self._interval == 0 or record.step in (self._first, self._steps):
            self._line(step_line(record, self._steps))
        if self._live is not None:
            self._live.update(record)

    def valid(self, record: ValidRecord) -> None:
        """Show a validation."""
        self._line(valid_line(record, self._steps))

    def memory(self, record: MemoryRecord) -> None:
        """Show what the memory of the latest measured step consisted of."""
        self._line(memory_line(record))

    def close(self) -> None:
        """Take the live line away."""
        if self._live is not None:
            self._live.close()
            self._live = None

    def _line(self, text: str) -> None:
        if self._live is not None:
            self._live.print(text)
        else:
            self._stream.write(text + "\n")
            self._stream.flush()


class _LiveLine:
    """The step in progress, on a terminal."""

    def __init__(self, stream: TextIO, steps: int, start_step: int) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("{task.fields[now]}"),
        )
        self._progress = Progress(*columns, console=RichConsole(file=stream), transient=True, refresh_per_second=4)
        self._task = self._progress.add_task("", total=steps, completed=start_step, now="")
        self._progress.start()

    def update(self, record: StepRecord) -> None:
        rate = f"{short(record.tokens_per_second)} tok/s"
        now = f"loss {fixed(record.loss, 5)}  {rate}  eta {clock(record.eta_seconds)}"
        self._progress.update(self._task, completed=record.step, now=now)

    def print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def headline(config: TrainConfig, costs: ModelCosts) -> str:
    """What is trained, in one line."""
    train, length = config.train, config.data.sequence_length
    sizes = f"{short(costs.parameters)} parameters, {short(costs.active_parameters)} active per token"
    return f"{sizes} | {train.steps} steps of {train.global_batch_sequences} sequences of {length} tokens"


def step_line(record: StepRecord, steps: int) -> str:
    """The line of one step: aligned with its neighbours, ASCII, below 160 columns."""
    experts = str(record.num_experts)
    groups = [
        f"step {_position(record.step, steps)}  loss {fixed(record.loss, 5)}  lr {record.lr:.1e}"
        f"  gnorm {fixed(record.gnorm, 4)}",
        f"balance {fixed(record.balance, 4)}  dead {record.dead:>{len(experts)}}/{experts}  drop {short(record.drop)}",
        f"{short(record.tokens_per_second):>5} tok/s  {_flops(record.flops_per_second)}",
        f"{fixed(record.memory_peak_bytes / 2**30, 3)} GiB",
        f"eta {clock(record.eta_seconds)}",
    ]
    return " | ".join(groups) + ("  SKIPPED" if record.skipped else "")


def valid_line(record: ValidRecord, steps: int) -> str:
    """The line of one validation."""
    loss, bits = fixed(record.valid_loss, 5), fixed(record.valid_bits_per_byte, 5)
    return f"valid{_position(record.step, steps)}  loss {loss}  {bits} bits/byte"


def memory_line(record: MemoryRecord) -> str:
    """The line of the peak of a step: classes of tensors that have a share of at least a hundredth."""
    name, phase = max(record.phases.items(), key=lambda item: item[1].tensor_bytes)
    shares = sorted(phase.classes.items(), key=lambda item: -item[1])
    words = [f"{kind} {_gib(size)}" for kind, size in shares if size >= 0.01 * phase.tensor_bytes]
    where = f"rank {record.rank}, {name}" if len(record.rank_bytes) > 1 else name
    return f"memory {_gib(phase.tensor_bytes)} GiB of tensors at most ({where}): {', '.join(words)}"


def _gib(size_bytes: int) -> str:
    return fixed(size_bytes / 2**30, 5).strip()


def _position(step: int, steps: int) -> str:
    return f"{step:>{max(4, len(str(steps)))}}/{steps}"


def _flops(rate: float) -> str:
    unit, scale = ("TF/s", 1e12) if rate >= 0.0995e12 else ("GF/s", 1e9)
    return f"{fixed(rate / scale, 4)} {unit}"
