"""What is installed, of the five kinds of plug-ins; `doctor` and `plugins` show it."""

from dataclasses import asdict, dataclass
from typing import Any

from moe_kernels.registry import PluginError, Registry

OUR_PREFIX = "moe-stack-"


@dataclass(frozen=True)
class PluginLine:
    """One installed plug-in.

    Attributes:
        kind: what it is, for example `dispatcher`.
        name: its name in configuration.
        distribution: name and version of the package that brings it.
        reason: why it cannot run here, or None.
        broken: it cannot even be loaded, wherever it runs.
    """

    kind: str
    name: str
    distribution: str
    reason: str | None
    broken: bool

    @property
    def ours(self) -> bool:
        return self.distribution.startswith(OUR_PREFIX)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def registries() -> list[Registry[Any]]:
    """All five, in the order in which they are shown."""
    from moe_comm.registry import DISPATCHERS
    from moe_kernels.grouped_gemm import GROUPED_GEMM
    from moe_train.plugins import MODELS, RECIPES, SINKS

    return [DISPATCHERS, GROUPED_GEMM, MODELS, RECIPES, SINKS]


def plugin_lines() -> list[PluginLine]:
    """Load every installed plug-in and say how it is."""
    return [
        PluginLine(
            kind=registry.noun,
            name=found.name,
            distribution=f"{found.distribution} {found.version}",
            reason=found.reason,
            broken=found.reason is not None and not _loads(registry, found.name),
        )
        for registry in registries()
        for found in registry.inventory()
    ]


def table(lines: list[PluginLine]) -> list[str]:
    """Aligned lines: OK or MISS, kind, name, where from, and the reason."""
    widths = [max((len(getattr(line, name)) for line in lines), default=0) for name in ("kind", "name", "distribution")]
    return [
        f"{'OK  ' if line.reason is None else 'MISS'}  {line.kind:<{widths[0]}}  {line.name:<{widths[1]}}  "
        f"{line.distribution:<{widths[2]}}  {line.reason or ''}".rstrip()
        for line in lines
    ]


def _loads(registry: Registry[Any], name: str) -> bool:
    try:
        registry.get(name)
    except PluginError:
        return False
    return True
