"""The `parallel` section of the configuration. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of parallelism; `dp` and `edp` follow from the number of ranks (`ParallelLayout`).

    Attributes:
        tp: ranks that share one dense layer's features.
        cp: ranks that share one sequence.
        pp: pipeline stages; the only degree that the dense and the expert view have in common.
        ep: ranks over which the experts of a layer are spread.
        etp: ranks that share one expert's features; independent of `tp`.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
