"""The `parallel` section of the configuration. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Any, ClassVar

from moe_parallel.problem import Problem


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of parallelism; `dp` and `edp` follow from the number of ranks (`ParallelLayout`).

    Attributes:
        tp: ranks that share one dense layer's features.
        cp: ranks that share one sequence.
        pp: pipeline stages; the only degree that the dense and the expert view have in common.
        ep: ranks over which the experts of a layer are spread.
        etp: ranks that share one expert's features; independent of `tp`.
        timeout_s: after so many seconds without its peers a rank gives up.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    timeout_s: float = 600.0

    def problems(self) -> list[Problem]:
        """Rules that need no number of ranks; `ParallelLayout` knows the others."""
        if 0 < self.timeout_s < float("inf"):
            return []
        rule = "a number of seconds is finite and above 0"
        return [Problem(key="parallel.timeout_s", value=self.timeout_s, rule=rule)]
