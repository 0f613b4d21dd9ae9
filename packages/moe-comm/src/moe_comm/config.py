"""The `comm` section of the configuration: one dataclass per dispatcher, told apart by `kind`; nothing is imported."""

from dataclasses import dataclass
from math import ceil, isfinite
from typing import Any, ClassVar, Literal

from moe_parallel.problem import Problem


@dataclass(frozen=True, kw_only=True)
class RowsConfig:
    """How many rows the experts of a rank get; the options of every dispatcher that can have fixed sizes.

    Attributes:
        rank_capacity_factor: rows of a rank, as a multiple of those it has under even load; None gives each forward the
            rows it needs, at the price of a host synchronisation.
        overflow: what more choices are: an error at the end of the step (`raise`), or without an expert (`drop`).
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    rank_capacity_factor: float | None = None
    overflow: Literal["raise", "drop"] = "raise"

    def problems(self) -> list[Problem]:
        """Every violated rule."""
        factor = self.rank_capacity_factor
        if factor is None or (isfinite(factor) and factor > 0):
            return []
        rule = "must be finite and above 0, or none"
        return [Problem(key="comm.rank_capacity_factor", value=factor, rule=rule)]

    def capacity_rows(self, tokens: int, top_k: int, etp: int) -> int | None:
        """Rows of a rank for so many tokens on every rank, of which `etp` share an expert."""
        if self.rank_capacity_factor is None:
            return None
        return ceil(self.rank_capacity_factor * tokens * top_k * etp)


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Sizes of a layer by which a dispatcher is chosen; moe-train fills in those of its model.

    Attributes:
        tokens: of a rank, in one forward pass.
        hidden: features of a token as it travels.
        itemsize: bytes of a feature.
        top_k: choices of a token.
        groups: of experts, of which a token chooses among `chosen_groups`.
        chosen_groups: of them.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    tokens: int
    hidden: int
    top_k: int
    itemsize: int = 2
    groups: int = 1
    chosen_groups: int = 1


@dataclass(frozen=True, kw_only=True)
class AutoConfig(RowsConfig):
    """The dispatcher that should be fastest on the layout, by bytes and latency; the log says which and why.

    Attributes:
        kind: selects this choice.
        layer: what it is chosen for; None goes by the number of nodes alone.
        network_gb_per_s: what a rank has to itself between nodes, in 10^9 bytes per second.
        nvlink_gb_per_s: the same inside a node.
        collective_us: start of a collective.
    """

    kind: Literal["auto"] = "auto"
    layer: LayerConfig | None = None
    network_gb_per_s: float = 50.0
    nvlink_gb_per_s: float = 450.0
    collective_us: float = 5.0

    def problems(self) -> list[Problem]:
        """Every violated rule."""
        found = super().problems()
        for name in ("network_gb_per_s", "nvlink_gb_per_s"):
            speed = getattr(self, name)
            if not (isfinite(speed) and speed > 0):
                found.append(Problem(key=f"comm.{name}", value=speed, rule="must be finite and above 0"))
        if not (isfinite(self.collective_us) and self.collective_us >= 0):
            rule = "must be finite and at least 0"
            found.append(Problem(key="comm.collective_us", value=self.collective_us, rule=rule))
        return found


@dataclass(frozen=True, kw_only=True)
class LocalConfig(RowsConfig):
    """The dispatcher of one expert-parallel rank.

    Attributes:
        kind: selects the dispatcher.
    """

    kind: Literal["local"] = "local"


@dataclass(frozen=True, kw_only=True)
class AllToAllConfig(RowsConfig):
    """The dispatcher that sends tokens straight to the ranks of their experts.

    Attributes:
        kind: selects the dispatcher.
        row: one row of a token for every rank that has an expert of it (`per_rank`), where the answers are added up; or
            one for every choice (`per_expert`): more bytes, and sums that are rounded once.
    """

    kind: Literal["alltoall"] = "alltoall"
    row: Literal["per_rank", "per_expert"] = "per_rank"


@dataclass(frozen=True, kw_only=True)
class AllGatherConfig(RowsConfig):
    """The dispatcher that gives every rank all tokens.

    Attributes:
        kind: selects the dispatcher.
    """

    kind: Literal["allgather"] = "allgather"


@dataclass(frozen=True, kw_only=True)
class HybridConfig(RowsConfig):
    """The dispatcher of two levels: between nodes, and inside a node.

    Attributes:
        kind: selects the dispatcher.
        rail: how a token crosses the network: to the nodes that have an expert of it (`alltoall`), or to all of them
            (`allgather`), which needs no sizes and costs little more where there are few nodes.
        lanes: consecutive parts of the tokens; while one travels inside the node, the next is on the network.
    """

    kind: Literal["hybrid"] = "hybrid"
    rail: Literal["alltoall", "allgather"] = "alltoall"
    lanes: int = 1

    def problems(self) -> list[Problem]:
        """Every violated rule."""
        found = super().problems()
        if self.lanes < 1:
            found.append(Problem(key="comm.lanes", value=self.lanes, rule="must be at least 1"))
        return found
