"""Memory saving with a given effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zerowatch.runtime.trainer.engine_change import EngineChange


@dataclass(frozen=True)
class FakeMemorySaving:
    change: EngineChange
    effect: Callable[[], bool]

    def apply(self) -> bool:
        return self.effect()
