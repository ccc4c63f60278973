"""How a profiled step was spent, from its intervals: computing, communicating, both or neither.

Pure: it knows intervals by what they are for, and no profiler.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..collectives.comm_time import Interval, IntervalUnion


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeCommOverlap:
    """Seconds of a step by part; the parts exclude each other and add up to it.

    On CPU, where a part is what the training thread runs, time in Python is idle.
    """

    compute: float
    comm: float
    overlap: float
    idle: float

    @property
    def seconds(self) -> float:
        """The step's length."""
        return self.compute + self.comm + self.overlap + self.idle

    def ratios(self) -> dict[str, float]:
        """Each part over the step's length."""
        seconds = self.seconds
        if not seconds:
            return {}
        return {
            "compute": self.compute / seconds,
            "comm": self.comm / seconds,
            "overlap": self.overlap / seconds,
            "idle": self.idle / seconds,
        }


def step_shares(
    window: Interval, compute: Iterable[Interval], comm: Iterable[Interval]
) -> ComputeCommOverlap:
    """Split a window by what went on in it; intervals may overlap, and reach beyond it."""
    computing, communicating = _within(window, compute), _within(window, comm)
    compute_ns, comm_ns = IntervalUnion().add_ns(computing), IntervalUnion().add_ns(communicating)
    busy_ns = IntervalUnion().add_ns(computing + communicating)
    return ComputeCommOverlap(
        compute=(busy_ns - comm_ns) / 1e9,
        comm=(busy_ns - compute_ns) / 1e9,
        overlap=(compute_ns + comm_ns - busy_ns) / 1e9,
        idle=(window[1] - window[0] - busy_ns) / 1e9,
    )


def _within(window: Interval, intervals: Iterable[Interval]) -> list[Interval]:
    """Return what of the intervals lies in a window."""
    cut = ((max(start, window[0]), min(end, window[1])) for start, end in intervals)
    return [(start, end) for start, end in cut if start < end]
