"""Which engine is watched: it may be another one after a rebuild."""

from __future__ import annotations

import weakref
from typing import Any


class EngineRef:
    """Gives the watched engine, None once it is gone; holds it weakly."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> Any:
        """Return the engine."""
        return self._engine()

    def point_at(self, engine: Any) -> None:
        """Give this engine from now on."""
        self._engine = weakref.ref(engine)
