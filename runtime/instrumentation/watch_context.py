"""What the rooms that are joined on one engine are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...metrics.recorder import Recorder
from ...metrics.settings import Settings
from ..collectives.recorder import CallRecorder
from ..common.fail_open import FailOpen
from ..common.phase_timer import PhaseTimer
from ..common.process_info import ProcessInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchContext:
    """The watch of one engine, as its parts see it.

    `engine` gives the watched engine, None once it is gone; `watch_index` is how many watches this
    process has had; `call_recorder` has its collectives; `run_id` gives the run's name, once it is
    known, and `folder` the run folder, where there is one.
    """

    engine: Callable[[], Any]
    identity: ProcessInfo
    watch_index: int
    settings: Settings
    call_recorder: CallRecorder
    clock: PhaseTimer
    run_id: Callable[[], str | None]
    folder: Callable[[], Path | None]
    recorder: Recorder
    fail_open: FailOpen
