"""The objects that the parts of one watch share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...metrics.series import Recorder
from ...metrics.settings import Settings
from ..collectives.call_recorder import CallRecorder
from ..common.fail_open import FailOpen
from ..common.phase_timer import PhaseTimer
from ..common.process_info import ProcessInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchContext:
    """The shared objects of one watch.

    Attributes:
        engine: Returns the watched engine; None once it is gone.
        watch_index: How many watches this process had before.
        call_recorder: The collectives of the process.
        run_id: Returns the run's id; None until it is known.
        folder: Returns the run folder; None until the run has an id, or without one.
    """

    engine: Callable[[], Any]
    identity: ProcessInfo
    watch_index: int
    settings: Settings
    call_recorder: CallRecorder
    phase_timer: PhaseTimer
    run_id: Callable[[], str | None]
    folder: Callable[[], Path | None]
    recorder: Recorder
    fail_open: FailOpen
