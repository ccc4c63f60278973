"""Monitoring-first training runtime for DeepSpeed.

It exports step times, collectives and memory of every rank to Prometheus and OpenTelemetry.

Stability: monitoring (`initialize`, `watch`, `Watch`, `StepRecord`, `Settings`) is stable,
`TrainingRun` and `StepResult` are beta, tuner and gradient compression are experimental.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .metrics import start_folder as _start_folder  # noqa: F401 (before the script changes it)

if TYPE_CHECKING:
    __version__: str
    from .errors import BatchError as BatchError
    from .errors import CheckpointError as CheckpointError
    from .errors import CommandLineError as CommandLineError
    from .errors import DsConfigError as DsConfigError
    from .errors import NonFiniteLossError as NonFiniteLossError
    from .errors import PeerFailedError as PeerFailedError
    from .errors import PeerOutOfMemoryError as PeerOutOfMemoryError
    from .errors import RebuildError as RebuildError
    from .errors import SettingsError as SettingsError
    from .errors import ZerowatchError as ZerowatchError
    from .metrics.settings import Settings as Settings
    from .metrics.step_record import StepRecord as StepRecord
    from .runtime.entry_points import initialize as initialize
    from .runtime.entry_points import watch as watch
    from .runtime.integrations.accelerate_tracker import AccelerateTracker as AccelerateTracker
    from .runtime.integrations.lightning_callback import LightningCallback as LightningCallback
    from .runtime.integrations.transformers_callback import (
        TransformersCallback as TransformersCallback,
    )
    from .runtime.monitor.watch import Watch as Watch
    from .runtime.sinks.mlflow_sink import MlflowSink as MlflowSink
    from .runtime.sinks.sink import Sink as Sink
    from .runtime.sinks.sink import SinkRun as SinkRun
    from .runtime.sinks.tensorboard_sink import TensorboardSink as TensorboardSink
    from .runtime.sinks.wandb_sink import WandbSink as WandbSink
    from .runtime.trainer.window.step_result import StepResult as StepResult
    from .runtime.training_run import TrainingRun as TrainingRun

_MODULES = {
    "AccelerateTracker": "runtime.integrations.accelerate_tracker",
    "BatchError": "errors",
    "CheckpointError": "errors",
    "CommandLineError": "errors",
    "DsConfigError": "errors",
    "LightningCallback": "runtime.integrations.lightning_callback",
    "MlflowSink": "runtime.sinks.mlflow_sink",
    "NonFiniteLossError": "errors",
    "PeerFailedError": "errors",
    "PeerOutOfMemoryError": "errors",
    "RebuildError": "errors",
    "Settings": "metrics.settings",
    "SettingsError": "errors",
    "Sink": "runtime.sinks.sink",
    "SinkRun": "runtime.sinks.sink",
    "StepRecord": "metrics.step_record",
    "StepResult": "runtime.trainer.window.step_result",
    "TensorboardSink": "runtime.sinks.tensorboard_sink",
    "TrainingRun": "runtime.training_run",
    "TransformersCallback": "runtime.integrations.transformers_callback",
    "WandbSink": "runtime.sinks.wandb_sink",
    "Watch": "runtime.monitor.watch",
    "ZerowatchError": "errors",
    "initialize": "runtime.entry_points",
    "watch": "runtime.entry_points",
}
# The extra that a name needs. Without it, the name stands for a class that cannot be created.
_EXTRAS = {
    "AccelerateTracker": "hf",
    "LightningCallback": "lightning",
    "TransformersCallback": "hf",
}
__all__ = [
    "AccelerateTracker",
    "BatchError",
    "CheckpointError",
    "CommandLineError",
    "DsConfigError",
    "LightningCallback",
    "MlflowSink",
    "NonFiniteLossError",
    "PeerFailedError",
    "PeerOutOfMemoryError",
    "RebuildError",
    "Settings",
    "SettingsError",
    "Sink",
    "SinkRun",
    "StepRecord",
    "StepResult",
    "TensorboardSink",
    "TrainingRun",
    "TransformersCallback",
    "WandbSink",
    "Watch",
    "ZerowatchError",
    "initialize",
    "watch",
]


def __getattr__(name: str) -> object:
    """Import a public name on first use, so that `import zerowatch` does not import torch."""
    if name == "__version__":
        return import_module("importlib.metadata").version(__name__)
    if name in _MODULES:
        try:
            return getattr(import_module(f".{_MODULES[name]}", __name__), name)
        except ModuleNotFoundError as error:
            if name not in _EXTRAS:
                raise
            return _without_extra(name, error.name or str(error))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _without_extra(name: str, missing: str) -> type:
    """Return a class in place of one that cannot be imported, so that help() and `*` work."""
    needs = f"zerowatch.{name} needs {missing}: pip install 'zerowatch[{_EXTRAS[name]}]'"

    def refuse(self: object, *args: object, **kwargs: object) -> None:
        raise ModuleNotFoundError(needs, name=missing)

    return type(name, (), {"__init__": refuse, "__doc__": needs, "__module__": __name__})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
