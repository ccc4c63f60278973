"""Training-thread time by phase. Phases exclude each other and add up to wall time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter_ns

from ...metrics.catalog.labels import PHASES

DATA, FORWARD, BACKWARD, OPTIMIZER, EVAL, CHECKPOINT, OTHER = range(len(PHASES))
_NON_TRAINING = (EVAL, CHECKPOINT)
# Of one step; what is more, as of very many micro-batches, loses the earliest.
MAX_INTERVALS = 4096

PhaseInterval = tuple[int, int, int]  # a phase, and from when to when it had the time


class PhaseTimer:
    """A stack of phases over one clock, which starts with the first; the innermost gets the time.

    Driven by the training thread. `current` may be read from any thread: it tags collectives, of
    which autograd's threads issue some.

    Attributes:
        strayed: Set when an evaluation or a checkpoint begins; to be taken back by who reads it.
        on_change: Called with the phase under way, an index of PHASES, as another begins or it
            ends; None where nobody listens.
    """

    __slots__ = (
        "_intervals",
        "_now",
        "_outer",
        "_started",
        "_totals",
        "current",
        "on_change",
        "since_ns",
        "strayed",
    )

    def __init__(self, now: Callable[[], int] = perf_counter_ns) -> None:
        self._now = now
        self._totals = [0] * len(PHASES)
        self._intervals: deque[PhaseInterval] | None = None
        self._outer: list[int] = []
        self._started = False
        self.strayed = False
        self.on_change: Callable[[int], object] | None = None
        self.current = OTHER
        self.since_ns = now()

    def enter(self, phase: int) -> None:
        """Begin a phase inside the one under way."""
        if not self._started:
            self._started = True
            self.since_ns = self._now()
        self._accrue()
        self._outer.append(self.current)
        self.current = phase
        if phase in _NON_TRAINING:
            self.strayed = True

    def leave(self) -> None:
        """End the innermost phase and go on with the one around it."""
        self._accrue()
        self.current = self._outer.pop()

    def idle_seconds(self) -> float:
        """Return the time since a phase last began or ended. May be asked on any thread."""
        return (self._now() - self.since_ns) / 1e9

    def take(self) -> list[int]:
        """Return the nanoseconds of each phase since the last call, in the order of PHASES."""
        self._accrue()
        totals, self._totals = self._totals, [0] * len(PHASES)
        return totals

    def keep_intervals(self) -> None:
        """Keep from now on when each phase began and ended, for `take_intervals`."""
        self._intervals = deque(maxlen=MAX_INTERVALS)

    def take_intervals(self) -> Iterable[PhaseInterval]:
        """Return the intervals since the last call, in order; none where they are not kept."""
        if self._intervals is None:
            return ()
        kept, self._intervals = self._intervals, deque(maxlen=MAX_INTERVALS)
        return kept

    def _accrue(self) -> None:
        if self.on_change is not None:
            self.on_change(self.current)
        now = self._now()
        self._totals[self.current] += now - self.since_ns
        if self._intervals is not None:
            self._intervals.append((self.current, self.since_ns, now))
        self.since_ns = now
