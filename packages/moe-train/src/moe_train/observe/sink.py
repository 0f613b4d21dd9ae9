"""`MetricSink`: the seam through which metrics leave a run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from moe_train.observe.record import Record
from moe_train.plugins import SINKS

if TYPE_CHECKING:
    from moe_train.run_directory import RunDirectory


class MetricSink(Protocol):
    """Receives every record of a run in order, from the rank that reports."""

    def write(self, record: Record) -> None:
        """Take one record, of any kind; when it returns, a kill of the process does not lose it."""

    def close(self) -> None:
        """No record will follow."""


def open_sinks(names: Sequence[str], run: "RunDirectory", step: int) -> list[MetricSink]:
    """Open the named sinks for a run that has finished `step` steps.

    Raises:
        PluginError: a sink is unknown or cannot run here.
    """
    return [SINKS.get_available(name).open(run, step) for name in names]
