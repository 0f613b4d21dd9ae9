"""moe-train: the trainer."""

from importlib import import_module
from typing import TYPE_CHECKING

from moe_train._version import __version__ as __version__

if TYPE_CHECKING:
    from moe_train.config.error import ConfigError as ConfigError
    from moe_train.config.load import LoadedConfig as LoadedConfig, load_config as load_config
    from moe_train.config.toml import to_toml as to_toml
    from moe_train.config.tree import TrainConfig as TrainConfig
    from moe_train.errors import MoeTrainError as MoeTrainError
    from moe_train.observe.record import LoadRecord as LoadRecord, StepRecord as StepRecord, ValidRecord as ValidRecord
    from moe_train.observe.report import write_report as write_report
    from moe_train.observe.sink import MetricSink as MetricSink
    from moe_train.plugins import RecipePlugin as RecipePlugin, SinkPlugin as SinkPlugin
    from moe_train.run_directory import RunDirectory as RunDirectory

# Public name to module. Loaded on first use, so that configuration and the command line work without importing torch.
_MODULE_OF = {
    "ConfigError": "config.error",
    "load_config": "config.load",
    "LoadedConfig": "config.load",
    "LoadRecord": "observe.record",
    "MetricSink": "observe.sink",
    "MoeTrainError": "errors",
    "RecipePlugin": "plugins",
    "RunDirectory": "run_directory",
    "SinkPlugin": "plugins",
    "StepRecord": "observe.record",
    "to_toml": "config.toml",
    "TrainConfig": "config.tree",
    "ValidRecord": "observe.record",
    "write_report": "observe.report",
}

__all__ = ["__version__", *_MODULE_OF]  # noqa: PLE0604


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
