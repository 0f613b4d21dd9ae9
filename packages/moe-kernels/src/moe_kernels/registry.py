"""`Registry`: plug-ins of one kind, found through installed entry points and loaded only when chosen.

The five plug-in kinds of the stack (dispatchers, grouped GEMM backends, models, recipes, sinks) share this class.
Built-ins are entry points like everybody else's. Nothing here imports torch.
"""

import difflib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, Protocol, TypeVar

from moe_kernels.errors import MoeKernelsError

logger = logging.getLogger(__name__)


class PluginError(MoeKernelsError):
    """A plug-in is unknown, ambiguous, broken or written for another interface version."""


class PluginRecord(Protocol):
    """What every plug-in record states."""

    @property
    def name(self) -> str: ...

    @property
    def interface_version(self) -> int:
        """Version of the seam that the plug-in was written for."""

    def available(self) -> str | None:
        """None if it can run on this machine, else the reason and what would help."""


R = TypeVar("R", bound=PluginRecord)


@dataclass(frozen=True)
class Installed:
    """One line of an inventory: a plug-in, where it comes from, and the reason why it cannot run here, or None."""

    name: str
    distribution: str
    version: str
    reason: str | None


class Registry(Generic[R]):
    """The installed plug-ins of one entry-point group.

    Args:
        group: entry-point group, for example `moe_comm.dispatchers`.
        noun: what one plug-in is called in messages, for example `dispatcher`.
        record: the type that every entry point must resolve to.
        interface_version: the version of the seam that this release speaks.
    """

    def __init__(self, group: str, noun: str, record: type[R], interface_version: int) -> None:
        self.group = group
        self.noun = noun
        self._record = record
        self._interface_version = interface_version

    def names(self) -> list[str]:
        """Names of all installed plug-ins, sorted; none is loaded."""
        return sorted({entry.name for entry in _entries(self.group)})

    def get(self, name: str) -> R:
        """Load one plug-in.

        Raises:
            PluginError: nothing of that name is installed (the message lists what is), two distributions claim the
                name, loading fails, or the plug-in speaks another interface version.
        """
        found = [entry for entry in _entries(self.group) if entry.name == name]
        if not found:
            raise PluginError(f"unknown {self.noun} {name!r}; {self._installed_here(name)}")
        owners = sorted({_owner(entry) for entry in found})
        if len(owners) > 1:
            raise PluginError(f"{self.noun} {name!r} is claimed by {' and by '.join(owners)}; uninstall all but one")
        entry = found[0]
        try:
            record = entry.load()
        except Exception as error:
            raise PluginError(
                f"{self.noun} {name!r} of {owners[0]} could not be loaded: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(record, self._record):
            raise PluginError(
                f"{self.noun} {name!r} of {owners[0]} resolves to {type(record).__name__}, "
                f"expected {self._record.__name__}"
            )
        if record.interface_version != self._interface_version:
            raise PluginError(
                f"{self.noun} {name!r} of {owners[0]} was written for interface version {record.interface_version}, "
                f"this release speaks {self._interface_version}; install a matching release of it"
            )
        if record.name != name:
            raise PluginError(f"{self.noun} {name!r} of {owners[0]} calls itself {record.name!r}")
        return record

    def get_available(self, name: str) -> R:
        """Load one plug-in and make sure that it can run here.

        Raises:
            PluginError: as `get`, or the plug-in cannot run here; an explicit name never falls back to another.
        """
        record = self.get(name)
        reason = record.available()
        if reason is not None:
            raise PluginError(f"{self.noun} {name!r} cannot run here: {reason}")
        return record

    def first(self, order: Iterable[str], accepts: Callable[[R], str | None]) -> R:
        """Walk an ordered list and return the first plug-in that `accepts` (a reason for refusal, or None).

        One line is logged: what was chosen and why the better ones were not.

        Raises:
            PluginError: nothing on the list can run; the message has every reason.
        """
        refused: list[str] = []
        for name in order:
            record = self.get(name)
            reason = record.available() or accepts(record)
            if reason is None:
                logger.info("%s: %s%s", self.noun, name, f" ({'; '.join(refused)})" if refused else "")
                return record
            refused.append(f"not {name}: {reason}")
        raise PluginError(f"no {self.noun} can run here: {'; '.join(refused)}")

    def inventory(self) -> list[Installed]:
        """Load every installed plug-in and report it; a plug-in that fails to load is reported, not raised."""
        lines = []
        for entry in sorted(_entries(self.group), key=lambda entry: (entry.name, _owner(entry))):
            try:
                reason = self.get(entry.name).available()
            except PluginError as error:
                reason = str(error)
            distribution = entry.dist
            lines.append(
                Installed(
                    name=entry.name,
                    distribution=distribution.name if distribution else "unknown",
                    version=distribution.version if distribution else "unknown",
                    reason=reason,
                )
            )
        return lines

    def _installed_here(self, name: str) -> str:
        names = self.names()
        text = f"installed here: {', '.join(names) if names else 'none'}"
        close = difflib.get_close_matches(name, names, n=1)
        return f"{text}; did you mean {close[0]!r}?" if close else text


@cache
def _entries(group: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=group))


def _owner(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
