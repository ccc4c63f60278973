"""What stands in for a watch where there is none, so that a script need not ask."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from ...metrics.recorder import Recorder
from ...metrics.snapshot import Snapshot
from ...metrics.step_record import StepRecord


class NullWatch:
    """Has a watch's face and does nothing: watching is switched off, or could not start."""

    run_id: str | None = None
    run_folder: Path | None = None
    address: str | None = None
    is_open = False

    def __init__(self) -> None:
        self.recorder = Recorder()  # that nobody reads

    def watches(self, engine: Any) -> bool:
        """Watch none."""
        return False

    def subscribe(self, listener: Callable[[StepRecord], object]) -> None:
        """Never call the listener."""

    def snapshot(self) -> Snapshot:
        """Return a snapshot without values."""
        return Snapshot(values={}, distributions={})

    def rebind_engine(self, engine: Any) -> None:
        """Be found at another engine."""
        engine.watch = self

    def discard_window(self) -> None:
        """Do nothing."""

    def suspended(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is counted."""
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""
