"""When training hangs: pure timing, without clocks, threads or files of its own."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

FIRST_STEPS = 3
MEDIAN_OF_STEPS = 64
STEPS_PER_LIMIT = 10
MOST_LIMITS = 2  # that are told of one hang
# Looks are a second apart. If they are further apart than this, the process was stopped, or its
# interpreter lock was held: nobody could look, and it cannot be told whether training moved.
BLIND_NS = 5 * 10**9
# A rank that is told of a hang joins in only if it does not move itself.
TOLD_SECONDS = 2.0


class State(Enum):
    """What is new at one look."""

    NOTHING = auto()
    HANG = auto()  # this rank has made no progress for longer than the limit
    LASTING = auto()  # and for a second limit
    TOLD = auto()  # others hang, and this rank has not found so itself
    MOVED = auto()  # progress after any of these: armed again


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What is to be seen at one moment.

    Attributes:
        now_ns: The time of the look.
        activity_ns: The time of the last progress, on the same clock.
        paused: Whether training may lawfully stand still now.
        others_hang: Whether another rank says that it hangs.
        excused: Asked once the limit is passed, as it costs more: whether training is busy with
            something that shows no progress, such as compilation.
    """

    now_ns: int
    activity_ns: int
    paused: bool
    others_hang: bool
    excused: Callable[[], bool]


class Detector:
    """Decides at each look whether training hangs: once for each limit, and anew after progress.

    The limit is `seconds`, or ten times the median of the last steps where that is more. Nothing
    is a hang before three steps are done. Time that passes in a pause does not count.
    """

    def __init__(self, seconds: float) -> None:
        self.steps = 0
        self._seconds = seconds
        self._step_seconds: deque[float] = deque(maxlen=MEDIAN_OF_STEPS)
        self._limit_seconds: float | None = seconds
        self._limits_passed = 0
        self._alarmed = False  # by own finding, or told
        self._told = False
        self._looked_ns = 0
        self._activity_ns = 0
        self._counted_from_ns = 0

    @property
    def limit_seconds(self) -> float:
        """How long training may stand still, in seconds."""
        if self._limit_seconds is None:
            median = statistics.median(self._step_seconds)
            self._limit_seconds = max(self._seconds, STEPS_PER_LIMIT * median)
        return self._limit_seconds

    @property
    def silent_seconds(self) -> float:
        """Seconds without progress at the last look; time in pauses left out."""
        return max(0, self._looked_ns - self._counted_from_ns) / 1e9

    def step_ended(self, seconds: float) -> None:
        """Count a step that took so long."""
        self.steps += 1
        self._step_seconds.append(seconds)
        self._limit_seconds = None

    def look(self, look: Look) -> State:
        """Take one look; they come about a second apart."""
        moved = self._take_time(look)
        told = look.others_hang and self.silent_seconds >= TOLD_SECONDS
        newly_told, self._told = told and not self._told, told
        if moved and self._alarmed:
            self._limits_passed, self._alarmed = 0, False
            return State.MOVED
        if self._limits_passed < MOST_LIMITS and self._passes_limit(look):
            self._limits_passed += 1
            self._alarmed = True
            return State.HANG if self._limits_passed == 1 else State.LASTING
        if newly_told and not self._alarmed:
            self._alarmed = True
            return State.TOLD
        return State.NOTHING

    def _take_time(self, look: Look) -> bool:
        """Move on to this look; return whether there was progress since the one before."""
        blind_ns = look.now_ns - self._looked_ns if self._looked_ns else 0
        self._looked_ns = look.now_ns
        if blind_ns > BLIND_NS:
            self._counted_from_ns += blind_ns
        moved = look.activity_ns > self._activity_ns
        if moved:
            self._activity_ns = look.activity_ns
            self._counted_from_ns = max(self._counted_from_ns, look.activity_ns)
        if look.paused:
            self._counted_from_ns = look.now_ns
        return moved

    def _passes_limit(self, look: Look) -> bool:
        """Whether the next limit is passed now; if that is excused, it begins anew."""
        before_seconds = self._limits_passed * self.limit_seconds
        if self.steps < FIRST_STEPS or self.silent_seconds < before_seconds + self.limit_seconds:
            return False
        if look.excused():
            self._counted_from_ns = look.now_ns - int(before_seconds * 1e9)
            return False
        return True
