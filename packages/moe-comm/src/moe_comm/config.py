"""The `comm` section of the configuration: one dataclass per dispatcher, told apart by `kind`; nothing is imported."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class AutoConfig:
    """The best dispatcher that can serve the layout; the log says which and why. It has no options.

    Attributes:
        kind: selects this choice.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["auto"] = "auto"


@dataclass(frozen=True, kw_only=True)
class LocalConfig:
    """The dispatcher of one expert-parallel rank; it has no options.

    Attributes:
        kind: selects the dispatcher.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["local"] = "local"


@dataclass(frozen=True, kw_only=True)
class AllToAllConfig:
    """The dispatcher that sends every choice of a token as a row of its own; it has no options.

    Attributes:
        kind: selects the dispatcher.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    kind: Literal["alltoall"] = "alltoall"
