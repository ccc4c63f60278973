"""Decides whether training hangs, from samples of its progress. It does not read a clock."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

# Number of steps that must have ended before a hang can be detected.
MIN_STEPS = 3
# Number of last steps whose median duration is computed.
MEDIAN_STEPS = 64
# The limit is at least this many times the median step.
LIMIT_STEPS = 10
# Maximum number of limits that are reported for one hang.
MAX_LIMITS = 2
# Longest gap between two updates, which are normally a second apart. After a longer gap, it is
# unknown whether training made progress: the process was stopped or its interpreter lock was held.
MAX_GAP_NS = 5 * 10**9
# If another rank announces a hang, this rank joins only after this time without its own progress.
MIN_ANNOUNCED_SECONDS = 2.0


class HangState(Enum):
    """The change that a sample has caused."""

    UNCHANGED = auto()
    HANG = auto()  # no progress on this rank for longer than the limit
    ABORT_LIMIT = auto()  # no progress for twice the limit: the setting hang.abort ends the process
    ANNOUNCED = auto()  # another rank announces a hang that this rank has not detected
    RESUMED = auto()  # progress after a hang or an announcement; detection starts over


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressSample:
    """One observation of progress.

    Attributes:
        now_ns: The time of the sample.
        activity_ns: The time of the last progress, on the same clock.
        is_pause: Whether no progress is expected now.
        others_hang: Whether another rank announces a hang.
    """

    now_ns: int
    activity_ns: int
    is_pause: bool
    others_hang: bool


class HangDetector:
    """Decides at each sample whether training hangs.

    It reports a hang once per limit, and can report another hang after progress. The limit is the
    greater of `seconds` and ten times the median of the last steps. No hang is detected before
    three steps have ended. Time in a pause does not count.
    """

    def __init__(self, seconds: float) -> None:
        self.num_steps = 0
        self._seconds = seconds
        self._step_seconds: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._limit_seconds: float | None = seconds
        self._limits_passed = 0
        self._is_alarmed = False  # by its own detection, or an announcement
        self._was_announced = False
        self._sampled_ns = 0
        self._activity_ns = 0
        self._silent_since_ns = 0

    @property
    def limit_seconds(self) -> float:
        """Longest accepted time without progress, in seconds."""
        if self._limit_seconds is None:
            median = statistics.median(self._step_seconds)
            self._limit_seconds = max(self._seconds, LIMIT_STEPS * median)
        return self._limit_seconds

    @property
    def silent_seconds(self) -> float:
        """Seconds without progress at the last sample, without pauses."""
        return max(0, self._sampled_ns - self._silent_since_ns) / 1e9

    def add_step(self, seconds: float) -> None:
        """Add a step that has ended, given its duration."""
        self.num_steps += 1
        self._step_seconds.append(seconds)
        self._limit_seconds = None

    def update(self, sample: ProgressSample, is_busy: Callable[[], bool]) -> HangState:
        """Add a sample. The caller adds about one per second.

        Args:
            sample: The sample.
            is_busy: Returns whether the process is busy with an activity that shows no progress,
                such as compilation. It is expensive, so it is called only when a limit is passed.
        """
        has_progressed = self._advance(sample)
        announced = sample.others_hang and self.silent_seconds >= MIN_ANNOUNCED_SECONDS
        newly_announced, self._was_announced = announced and not self._was_announced, announced
        if has_progressed and self._is_alarmed:
            self._limits_passed, self._is_alarmed = 0, False
            return HangState.RESUMED
        if self._limits_passed < MAX_LIMITS and self._passes_limit(sample, is_busy):
            self._limits_passed += 1
            self._is_alarmed = True
            return HangState.HANG if self._limits_passed == 1 else HangState.ABORT_LIMIT
        if newly_announced and not self._is_alarmed:
            self._is_alarmed = True
            return HangState.ANNOUNCED
        return HangState.UNCHANGED

    def _advance(self, sample: ProgressSample) -> bool:
        """Store the sample, and return whether there was progress since the previous one."""
        gap_ns = sample.now_ns - self._sampled_ns if self._sampled_ns else 0
        self._sampled_ns = sample.now_ns
        if gap_ns > MAX_GAP_NS:
            self._silent_since_ns += gap_ns
        has_progressed = sample.activity_ns > self._activity_ns
        if has_progressed:
            self._activity_ns = sample.activity_ns
            self._silent_since_ns = max(self._silent_since_ns, sample.activity_ns)
        if sample.is_pause:
            self._silent_since_ns = sample.now_ns
        return has_progressed

    def _passes_limit(self, sample: ProgressSample, is_busy: Callable[[], bool]) -> bool:
        """Whether the next limit is passed now. If the process is busy, the limit starts over."""
        before_seconds = self._limits_passed * self.limit_seconds
        if self.num_steps < MIN_STEPS or self.silent_seconds < before_seconds + self.limit_seconds:
            return False
        if is_busy():
            self._silent_since_ns = sample.now_ns - int(before_seconds * 1e9)
            return False
        return True
