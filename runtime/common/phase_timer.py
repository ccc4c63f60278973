"""Measures the time of the training thread by phase. The phases add up to the wall time.

On an accelerator, `instrumentation/device_phases.py` measures the same phases on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import perf_counter_ns

from ...metrics.catalog.labels import NON_TRAINING_PHASES, PHASES

DATA, FORWARD, BACKWARD, OPTIMIZER, EVAL, GENERATE, CHECKPOINT, OTHER = range(len(PHASES))
# Stands for the phase of an interval that does not count.
UNCOUNTED = -1
# The phases in which the model trains on a batch.
PASSES = (FORWARD, BACKWARD, OPTIMIZER)
GENERATE_PHASE = PHASES[GENERATE]
NON_TRAINING = tuple(map(PHASES.index, NON_TRAINING_PHASES))
# Maximum intervals kept for one step. If a step has more, the earliest intervals are dropped.
MAX_INTERVALS = 4096

PhaseInterval = tuple[int, int, int]  # phase, start and end in nanoseconds


class PhaseTimer:
    """Attributes time to the innermost phase of a stack, beginning with the first phase.

    Use the timer on the training thread. `current` may be read on any thread, because it labels
    collectives, and autograd's threads issue some of them.

    Attributes:
        current: The innermost phase, an index of PHASES.
        since_ns: Time of the last change of phase.
        left_training: Set when an evaluation or a checkpoint begins. The reader resets it.
        on_change: Called with the current phase before the phase changes, unless None.
        on_interval_end: Called with the phase of each interval that ends, or with UNCOUNTED, unless
            None.
    """

    __slots__ = (
        "_intervals",
        "_now_ns",
        "_outer",
        "_started",
        "_stopped",
        "_totals",
        "current",
        "left_training",
        "on_change",
        "on_interval_end",
        "since_ns",
    )

    def __init__(self, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        self._now_ns = now_ns
        self._totals = [0] * len(PHASES)
        self._intervals: deque[PhaseInterval] | None = None
        self._outer: list[int] = []
        self._started = self._stopped = False
        self.left_training = False
        self.on_change: Callable[[int], object] | None = None
        self.on_interval_end: Callable[[int], object] | None = None
        self.current = OTHER
        self.since_ns = now_ns()

    def enter(self, phase: int) -> None:
        """Begin a phase inside the current phase."""
        if not self._started:
            self._started = True
            self.since_ns = self._now_ns()
        self._accrue()
        self._outer.append(self.current)
        self.current = phase
        if phase in NON_TRAINING:
            self.left_training = True

    def leave(self) -> None:
        """End the innermost phase. The enclosing phase continues."""
        self._accrue()
        self.current = self._outer.pop()

    def stop(self) -> None:
        """Stop the clock until a phase begins or ends, as at the end of a cell of a notebook.

        The time since the last change of phase does not count either, if no pass of the next step
        has begun.
        """
        self._accrue(is_counted=self.current != OTHER or not self.is_between_steps())
        self._stopped = True

    @property
    def is_stopped(self) -> bool:
        """Whether the clock is stopped. May be read on any thread."""
        return self._stopped

    def idle_seconds(self) -> float:
        """Return the time since the last change of phase. May be called on any thread."""
        return (self._now_ns() - self.since_ns) / 1e9

    def forward_only_ns(self) -> int:
        """Return the time of forward passes and evaluations since the last step.

        The result is 0 once the first backward pass of the step has begun. May be called on any
        thread.
        """
        if self.current == BACKWARD or self._totals[BACKWARD]:
            return 0
        return self._totals[FORWARD] + self._totals[EVAL]

    def passes_ns(self) -> int:
        """Return the time of forward and backward passes since the last step."""
        return self._totals[FORWARD] + self._totals[BACKWARD]

    def is_between_steps(self) -> bool:
        """Whether no pass of the next step has begun, as in an evaluation or while saving.

        May be called on any thread.
        """
        return self.current not in PASSES and not self.passes_ns()

    def drain(self) -> list[int]:
        """Return the nanoseconds of each phase since the last call, in the order of PHASES."""
        self._accrue()
        totals, self._totals = self._totals, [0] * len(PHASES)
        return totals

    def record_intervals(self) -> None:
        """Start recording the beginning and end of each phase, for `drain_intervals`."""
        self._intervals = deque(maxlen=MAX_INTERVALS)

    def drain_intervals(self) -> Iterable[PhaseInterval]:
        """Return the intervals since the last call in order, or none if not recorded."""
        if self._intervals is None:
            return ()
        kept, self._intervals = self._intervals, deque(maxlen=MAX_INTERVALS)
        return kept

    def _accrue(self, *, is_counted: bool = True) -> None:
        if self.on_change is not None:
            self.on_change(self.current)
        is_counted, self._stopped = is_counted and not self._stopped, False
        if self.on_interval_end is not None:
            self.on_interval_end(self.current if is_counted else UNCOUNTED)
        now_ns = self._now_ns()
        if is_counted:
            self._totals[self.current] += now_ns - self.since_ns
            if self._intervals is not None:
                self._intervals.append((self.current, self.since_ns, now_ns))
        self.since_ns = now_ns
