"""What the chaos bench records of a run: plain data, in times of the monotonic clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.chaos.planned_faults import Fault

RANKS = (0, 1)
LAUNCHER = -1  # in place of a rank

# A line of a rank's event log, see `chaos_job.py`.
Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedFault:
    """A fault that was planted; times by the monotonic clock.

    Attributes:
        recovered: When all ranks trained steadily again.
        restarts: Attempts of the run that began because of it.
    """

    fault: Fault
    began: float
    ended: float
    recovered: float
    restarts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a process held at a moment; rank LAUNCHER is the launcher."""

    at: float
    rank: int
    pid: int
    resident_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """One request of /metrics; `error` is None if it was answered."""

    at: float
    seconds: float
    error: str | None

    @property
    def ended(self) -> float:
        return self.at + self.seconds
