"""Measures the time of the training thread by phase. The phases add up to the wall time.

On an accelerator, `instrumentation/device_phases.py` measures the same phases on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import get_ident
from time import perf_counter_ns

from ...metrics.catalog.labels import NON_TRAINING_PHASES, PHASES
from .hot_path import UNCOUNTED as UNCOUNTED
from .hot_path import PhaseClock
from .hot_path import PhaseInterval as PhaseInterval

DATA, FORWARD, BACKWARD, OPTIMIZER, EVAL, GENERATE, CHECKPOINT, OTHER = range(len(PHASES))
# The phases in which the model trains on a batch.
PASSES = (FORWARD, BACKWARD, OPTIMIZER)
GENERATE_PHASE = PHASES[GENERATE]
NON_TRAINING = tuple(map(PHASES.index, NON_TRAINING_PHASES))
# Maximum intervals kept for one step. If a step has more, the earliest intervals are dropped.
MAX_INTERVALS = 4096


class PhaseTimer(PhaseClock):
    """Attributes time to the innermost phase of a stack, beginning with the first phase.

    Use the timer on the training thread. `current` may be read on any thread, because it labels
    collectives, and autograd's threads issue some of them.

    Attributes:
        training_thread: Identifier of the thread that made the last step; until the first step, of
            the thread that made this object.
        pausing_threads: Identifiers of the other threads that evaluate, save or load now.
        current: The innermost phase, an index of PHASES.
        since_ns: Time of the last change of phase.
        replayed_ns: Time of the last `mark_replay`; 0 before the first.
        left_training: Set when an evaluation or a checkpoint begins. The reader resets it.
        on_change: Called with the current phase before the phase changes, unless None.
        records_intervals: Whether `record_intervals` was called.
        on_interval_end: Called with the phase of each interval that ends, or with UNCOUNTED, unless
            None.
    """

    __slots__ = ("_clock", "pausing_threads", "records_intervals", "replayed_ns")

    def __init__(self, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        super().__init__(now_ns, len(PHASES), OTHER, NON_TRAINING)
        self._clock = now_ns
        self.training_thread = get_ident()
        self.pausing_threads: list[int] = []
        self.records_intervals = False
        self.since_ns = now_ns()
        self.replayed_ns = 0

    def is_on_training_thread(self) -> bool:
        """Whether the calling thread is the training thread. May be called on any thread."""
        return get_ident() == self.training_thread

    def enter_pause(self, phase: int) -> None:
        """Enter a phase without steps, which is a phase only on the training thread."""
        if self.is_on_training_thread():
            self.enter(phase)
        else:
            self.pausing_threads.append(get_ident())

    def leave_pause(self) -> None:
        """End what `enter_pause` has begun on this thread. Training may have moved since then."""
        thread = get_ident()
        if thread in self.pausing_threads:
            self.pausing_threads.remove(thread)
        else:
            self.leave()

    def stop(self) -> None:
        """Stop the clock until a phase begins or ends, as at the end of a cell of a notebook.

        The time since the last change of phase does not count either, if no pass of the next step
        has begun.
        """
        self._accrue(self.current != OTHER or not self.is_between_steps())
        self._stopped = True

    @property
    def is_stopped(self) -> bool:
        """Whether the clock is stopped. May be read on any thread."""
        return self._stopped

    def mark_replay(self) -> None:
        """Count the replay of a captured graph as activity.

        If the graph is a whole step, no phase begins or ends in it.
        """
        self.replayed_ns = self._clock()

    @property
    def activity_ns(self) -> int:
        """Time of the last change of phase or replay. May be read on any thread."""
        return max(self.since_ns, self.replayed_ns)

    def idle_seconds(self) -> float:
        """Return the time since the last activity. May be called on any thread."""
        return (self._clock() - self.activity_ns) / 1e9

    def forward_only_ns(self) -> int:
        """Return the time of forward passes and evaluations since the last step.

        The result is 0 once the first backward pass of the step has begun. May be called on any
        thread.
        """
        if self.current == BACKWARD or self._nanoseconds(BACKWARD):
            return 0
        return self._nanoseconds(FORWARD) + self._nanoseconds(EVAL)

    def passes_ns(self) -> int:
        """Return the time of forward and backward passes since the last step."""
        return self._nanoseconds(FORWARD) + self._nanoseconds(BACKWARD)

    def was_outside_training(self) -> bool:
        """Whether there was an evaluation or a checkpoint since the last step, or is one now.

        May be called on any thread.
        """
        return self.current in NON_TRAINING or any(map(self._nanoseconds, NON_TRAINING))

    def is_between_steps(self) -> bool:
        """Whether no pass of the next step has begun, as in an evaluation or while saving.

        May be called on any thread.
        """
        return self.current not in PASSES and not self.passes_ns()

    def record_intervals(self) -> None:
        """Start recording the beginning and end of each phase, for `drain_intervals`."""
        self.records_intervals = True
        self._intervals = deque(maxlen=MAX_INTERVALS)

    def drain_intervals(self) -> Iterable[PhaseInterval]:
        """Return the intervals since the last call in order, or none if not recorded."""
        if self._intervals is None:
            return ()
        kept, self._intervals = self._intervals, deque(maxlen=MAX_INTERVALS)
        return kept
