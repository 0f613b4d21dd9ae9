"""`ConfigError`: everything that is wrong with a configuration, at once, and who set it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from moe_parallel.problem import Problem
from moe_train.config.toml import toml_value
from moe_train.errors import MoeTrainError


@dataclass(frozen=True)
class Source:
    """The layer that set a value: the option's default, a recipe, a TOML file or the command line."""

    layer: Literal["default", "recipe", "file", "command line"]
    name: str = ""

    def __str__(self) -> str:
        return f"{self.layer} {self.name}".rstrip()


@dataclass(frozen=True)
class Fault:
    """A problem and who set the value; no source where the text could not even be read as a setting."""

    problem: Problem
    source: Source | None = None

    def __str__(self) -> str:
        problem = self.problem
        if self.source is None:
            heading = f"{problem.key}: {problem.value}" if problem.value else problem.key
        else:
            heading = f"{problem.key} = {toml_value(problem.value)}  ({self.source})"
        sentence = problem.rule
        if problem.legal:
            sentence += f"; legal here: {problem.legal}"
        if problem.next_step:
            sentence += f"; {problem.next_step}"
        return f"{heading}\n    {sentence}"


class ConfigError(MoeTrainError):
    """A configuration is illegal; the message has every fault."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        count = f"{len(faults)} errors" if len(faults) > 1 else "an error"
        super().__init__("\n".join([f"{count} in the configuration:", *(f"  {fault}" for fault in faults)]))

    @property
    def problems(self) -> list[Problem]:
        """The violated rules without their sources."""
        return [fault.problem for fault in self.faults]
