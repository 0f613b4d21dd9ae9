"""The three kinds of plug-ins of the trainer: model families, recipes, metric sinks. Imports nothing heavy.

A plug-in is an entry point of an installed distribution that resolves to its record; built-ins are found the same way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moe_kernels.registry import Registry
from moe_train.models.spec import MODEL_INTERFACE_VERSION, ModelSpec

if TYPE_CHECKING:
    from moe_train.config.tree import TrainConfig
    from moe_train.observe.sink import MetricSink
    from moe_train.run_directory import RunDirectory

RECIPE_INTERFACE_VERSION = 1
SINK_INTERFACE_VERSION = 1


def _anywhere() -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class RecipePlugin:
    """A named starting point for a configuration (entry-point group `moe_train.recipes`).

    Attributes:
        name: how it is called on the command line.
        interface_version: the version of this seam that it was written for.
        summary: what it trains, in one line.
        build: makes the configuration.
        available: None if it can be built here, else the reason.
    """

    name: str
    interface_version: int
    summary: str
    build: Callable[[], "TrainConfig"]
    available: Callable[[], str | None] = _anywhere


@dataclass(frozen=True, kw_only=True)
class SinkPlugin:
    """A receiver of metrics (entry-point group `moe_train.sinks`).

    Attributes:
        name: its name in `observe.sinks`.
        interface_version: the version of this seam that it was written for.
        open: (run directory, number of finished steps) to the sink. A run that resumes has finished steps, and records
            of later steps must be forgotten, because they will come again.
        available: None if it can run here, else the reason.
    """

    name: str
    interface_version: int
    open: Callable[["RunDirectory", int], "MetricSink"]
    available: Callable[[], str | None] = _anywhere


MODELS: Registry[ModelSpec] = Registry("moe_train.models", "model family", ModelSpec, MODEL_INTERFACE_VERSION)
RECIPES: Registry[RecipePlugin] = Registry("moe_train.recipes", "recipe", RecipePlugin, RECIPE_INTERFACE_VERSION)
SINKS: Registry[SinkPlugin] = Registry("moe_train.sinks", "sink", SinkPlugin, SINK_INTERFACE_VERSION)
