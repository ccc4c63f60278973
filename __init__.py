"""zerowatch: a monitoring-first training runtime over DeepSpeed ZeRO."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .runtime.initialize import initialize as initialize
    from .runtime.initialize import watch as watch

__all__ = ["initialize", "watch"]


def __getattr__(name: str) -> object:
    """Load the public names on first use, so that `zerowatch.dashboards` never drags torch in."""
    if name in __all__:
        from .runtime import initialize as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
