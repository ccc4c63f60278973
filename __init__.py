"""zerowatch: a monitoring-first training runtime over DeepSpeed ZeRO."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .runtime.initialize import initialize as initialize
    from .runtime.initialize import watch as watch
    from .runtime.trainer.window.step_result import StepResult as StepResult
    from .runtime.training_run import TrainingRun as TrainingRun

_MODULES = {
    "initialize": "initialize",
    "watch": "initialize",
    "TrainingRun": "training_run",
    "StepResult": "trainer.window.step_result",
}
__all__ = ["StepResult", "TrainingRun", "initialize", "watch"]


def __getattr__(name: str) -> object:
    """Load the public names on first use, so that `zerowatch.dashboards` never drags torch in."""
    if name in _MODULES:
        return getattr(import_module(f".runtime.{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
