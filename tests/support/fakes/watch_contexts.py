"""The context of a watch without an engine's hooks: its parts are real, and nothing is served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import load_settings
from zerowatch.runtime.collectives.call_recorder import CallRecorder
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.phase_timer import PhaseTimer
from zerowatch.runtime.common.process_info import ProcessInfo
from zerowatch.runtime.common.step_errors import StepErrors
from zerowatch.runtime.instrumentation.watch_context import WatchContext


class PlainEngine(SimpleNamespace):
    """An engine with the attributes that a test gives it. It can be referred to weakly."""


def watch_context(
    engine: Any = None,
    *,
    rank: int = 0,
    world_size: int = 3,
    attempt: int = 0,
    run_id: str | None = "night-7",
    folder: Path | None = None,
    settings: Mapping[str, Any] | None = None,
    phase_timer: PhaseTimer | None = None,
) -> WatchContext:
    """Return the context of a rank of node "here"."""
    return WatchContext(
        engine=lambda: engine,
        identity=ProcessInfo(
            rank=rank, local_rank=rank, world_size=world_size, host="here", attempt=attempt
        ),
        watch_index=0,
        settings=load_settings(settings or {}),
        call_recorder=CallRecorder(),
        phase_timer=phase_timer or PhaseTimer(),
        run_id=lambda: run_id,
        folder=lambda: folder,
        recorder=Recorder(),
        fail_open=FailOpen(),
        step_errors=StepErrors(),
    )
