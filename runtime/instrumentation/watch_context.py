"""Holds the objects that several parts of one watch use, such as settings and recorder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...metrics.recorder import Recorder
from ...metrics.settings import Settings
from ..collectives.call_recorder import CallRecorder
from ..common.fail_open import FailOpen
from ..common.phase_timer import PhaseTimer
from ..common.process_info import ProcessInfo
from ..common.step_errors import StepErrors
from .device_phases import DevicePhases


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchContext:
    """The objects that several parts of one watch use.

    Attributes:
        engine: Returns the watched engine, or None if it was garbage-collected.
        identity: The rank, host and job of this process.
        watch_index: Number of watches that this process had before.
        settings: The settings of the run.
        call_recorder: Records the collectives of the process.
        phase_timer: Measures the phases of the training thread.
        device_phases: Measures the phases on the accelerator. None on CPU.
        device_index: torch's index of the accelerator that this rank trains on. None on CPU.
        run_id: Returns the run id, or None until it is known.
        folder: Returns the run folder. None until the run has an id, or if no run log is written.
        recorder: Holds the metric values.
        fail_open: Wraps functions that run inside training.
        step_errors: Collects errors within steps, for their traces.
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
    step_errors: StepErrors
    device_phases: DevicePhases | None = None
    device_index: int | None = None
