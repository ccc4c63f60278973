"""The engine in use, as seen by code that outlives it: a rebuild replaces the engine of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class EngineSource(Protocol):
    """Source of the engine in use."""

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The engine's ds config."""
