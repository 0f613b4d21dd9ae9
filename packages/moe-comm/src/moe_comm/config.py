"""The `comm` section of the configuration: one dataclass per dispatcher, told apart by `kind`; nothing is imported."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """The dispatcher of one expert-parallel rank; it has no options.

    Attributes:
        kind: selects the dispatcher.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["local"] = "local"
