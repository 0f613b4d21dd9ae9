"""The `kernels` section of the configuration. Imports nothing heavy."""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, kw_only=True)
class KernelsConfig:
    """Which implementation computes what.

    Attributes:
        grouped_gemm: name of an installed grouped GEMM backend, or `auto`: the first of an ordered list that supports
            the dtype and the device.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    grouped_gemm: str = "auto"
