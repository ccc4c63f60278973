"""Notices that steps have become slower or faster for good: a cumulative sum on log step times.

The constants were swept on simulated steps (`tests/bench/tuner_simulation.py`). What counts is
less what one step is off than how well the baseline is known: a baseline of 20 steps costs ten
times the false alarms of one that goes on to grow. Noise that carries on from step to step, as
theirs does, adds up some six times as fast as independent noise would.
"""

from __future__ import annotations

from bisect import insort
from typing import Literal

LEAST_BASELINE_STEPS, MOST_BASELINE_STEPS = 20, 200
# Half the least shift to be told; a shift has to add up to so much beyond that.
ALLOWANCE, ALARM = 0.025, 0.5
# From there on the baseline does not grow, lest it take in the very shift.
SUSPICION = 0.1
# Of the log of a step's time; where there is more, as on a shared machine, steps count less.
USUAL_NOISE = 0.04
# What a single step can count for, so that spikes alone are no shift.
MOST_A_STEP = 0.15


class Cusum:
    """Compares each step with the median of the first ones; after a shift it begins anew."""

    def __init__(self) -> None:
        self._first: list[float] = []  # in order of size
        self._slower = self._faster = 0.0
        self._scale = 1.0

    def add(self, log_seconds: float) -> Literal["slower", "faster"] | None:
        """Take in the log of a step's seconds, or seconds per sample; say if that is a shift."""
        num = len(self._first)
        if num >= LEAST_BASELINE_STEPS:
            off = log_seconds - self._first[num // 2]
            off = min(max(off * self._scale, -MOST_A_STEP), MOST_A_STEP)
            self._slower = max(0.0, self._slower + off - ALLOWANCE)
            self._faster = max(0.0, self._faster - off - ALLOWANCE)
        most = max(self._slower, self._faster)
        if most >= ALARM:
            shift: Literal["slower", "faster"] = "slower" if self._slower == most else "faster"
            self._first.clear()
            self._slower = self._faster = 0.0
            return shift
        if num < MOST_BASELINE_STEPS and most < SUSPICION:
            insort(self._first, log_seconds)
            if len(self._first) == LEAST_BASELINE_STEPS:
                self._scale = min(1.0, USUAL_NOISE / max(self._spread, 1e-9))
        return None

    @property
    def _spread(self) -> float:
        """Half the range of the middle 68 % of the baseline: one standard deviation, if normal."""
        num = len(self._first)
        return (self._first[num * 84 // 100] - self._first[num * 16 // 100]) / 2
