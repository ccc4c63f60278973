"""What the rooms that are joined on one engine are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...metrics.recorder import Recorder
from ...metrics.settings import Settings
from ..collectives.recorder import Notes
from ..common.fail_open import Hooks
from ..common.phase_timer import PhaseClock
from ..common.process_info import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The watch of one engine, as its parts see it.

    `engine` gives the watched engine, None once it is gone; `epoch` is how many watches this
    process has had; `notes` are those of its collectives; `run_id` gives the run's name, once it is
    known, and `folder` the run folder, where there is one.
    """

    engine: Callable[[], Any]
    identity: Identity
    epoch: int
    settings: Settings
    notes: Notes
    clock: PhaseClock
    run_id: Callable[[], str | None]
    folder: Callable[[], Path | None]
    recorder: Recorder
    hooks: Hooks
