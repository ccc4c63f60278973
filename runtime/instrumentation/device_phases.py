"""Measures the phases of training on the accelerator, by an event at each change of phase.

The host runs ahead of an accelerator: it queues a pass in a fraction of the time that the pass
takes, and waits later, wherever the script first reads a result. The host's times of the phases
therefore do not show what the device does. The times between events on the compute stream do: a
phase lasts from the moment at which the device reaches its first event to the moment at which it
reaches its last. If the device has work left while the host loads data, `data` is short. If the
device waits for the host, the wait counts for the phase that the host is in.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ...metrics.catalog.labels import PHASES
from ..collectives.event_pool import EventPool
from ..common import accelerator
from ..common.accelerator import Event
from ..common.gil_pauses import let_training_run
from ..common.phase_timer import BACKWARD, FORWARD, MAX_INTERVALS, UNCOUNTED, PhaseInterval

logger = logging.getLogger(__name__)

# Maximum number of marks that wait to be read. There are about six in a step, so this many wait
# only if the watch thread is stuck. The times of the steps without marks are then lost.
MAX_MARKS = 65536
# Number of marks that cannot be read, after which phases are no longer timed on the device.
MAX_LOST = 2


@dataclass(slots=True)
class DevicePhaseTimes:
    """The phases of one step on the device. The watch thread fills it in.

    Attributes:
        is_read: Whether the times were read, or are known to be lost.
        phase_ns: Nanoseconds of each phase, in the order of PHASES. None if they are lost, such as
            in a step in which a graph was captured.
        discarded_ns: Nanoseconds of forward and backward passes that were discarded.
        intervals: The start and end of each phase, in nanoseconds before the end of the step. Only
            the last MAX_INTERVALS.
    """

    is_read: bool = False
    phase_ns: list[int] | None = None
    discarded_ns: int = 0
    intervals: Sequence[PhaseInterval] = ()


class _Discard(Enum):
    """Stands in the queue of marks where the passes so far were discarded."""

    PASSES = 0


_Mark = tuple[int, Event | None]  # the phase that ends, and the event at its end


class DevicePhases:
    """Records an event on the compute stream at each change of phase, and reads it later.

    The compute stream is the stream that is current when the object is made. `mark`, `discard` and
    `end_step` run on the training thread, `read` on the watch thread. No method waits.
    """

    def __init__(self, events: EventPool) -> None:
        self._events = events
        self._accelerator = accelerator.current
        self._stream = self._accelerator.current_stream()
        self._marks: deque[_Mark | _Discard | DevicePhaseTimes] = deque()
        self._failed = self._has_gap = False
        self._num_lost = 0
        self._last: Event | None = None  # the last event that the device has passed
        self._totals = _Totals(is_lost=False)

    def mark(self, phase: int) -> None:
        """Mark the end of an interval of a phase, or of one that does not count (UNCOUNTED).

        The next interval begins at the same event.
        """
        if self._failed or len(self._marks) >= MAX_MARKS:
            self._has_gap = True
            return
        event, had_gap, self._has_gap = None, self._has_gap, True  # a gap if this raises
        if not (had_gap or self._events.disabled or self._accelerator.is_capturing()):
            event = self._events.record(self._stream)
        self._has_gap = False
        self._marks.append((phase, event))

    def discard(self) -> None:
        """Count the passes since the last step as discarded."""
        self._marks.append(_Discard.PASSES)

    def end_step(self) -> DevicePhaseTimes:
        """End a step at the last mark. Return its times, which are read later."""
        times = DevicePhaseTimes()
        if self._failed or len(self._marks) >= MAX_MARKS:
            times.is_read = self._has_gap = True
        else:
            self._marks.append(times)
        return times

    def read(self) -> None:
        """Read the marks that the device has passed, and complete the steps that end there.

        Raises:
            Exception: An event could not be read. The times of its step are lost. After MAX_LOST
                such errors, so are those of all later steps.
        """
        if self._failed:
            self.give_up()  # the training thread may have marked something meanwhile
        try:
            while self._marks and self._read_next(self._marks[0]):
                if isinstance(self._marks.popleft(), DevicePhaseTimes):
                    let_training_run()
        except BaseException as error:
            self._num_lost += 1
            if self._num_lost < MAX_LOST:
                self._lose_first_mark()
            else:
                self._stop(error)
            raise

    def _lose_first_mark(self) -> None:
        self._marks.popleft()
        self._last, self._totals.is_lost = None, True

    def give_up(self) -> None:
        """Read no event any more. The times of all steps that were not read are lost."""
        self._failed = True
        while self._marks:
            mark = self._marks.popleft()
            if isinstance(mark, DevicePhaseTimes):
                mark.is_read = True

    def _stop(self, error: BaseException) -> None:
        self.give_up()
        logger.warning(
            "phases are not timed on the device any more: %s. From now on the phases of steps are "
            "times of the host, which show where the script waits for the device.",
            error,
        )

    def _read_next(self, mark: _Mark | _Discard | DevicePhaseTimes) -> bool:
        """Read the next mark. Return False if the device has not passed it."""
        if isinstance(mark, DevicePhaseTimes):
            self._totals.write(mark)
            self._totals = _Totals(is_lost=self._last is None)
        elif isinstance(mark, _Discard):
            self._totals.discarded_ns = self._totals.passes_ns()
        else:
            phase, event = mark
            if event is not None and not event.query():
                return False
            self._add(phase, event)
        return True

    def _add(self, phase: int, event: Event | None) -> None:
        before, self._last = self._last, event
        totals = self._totals
        totals.num_marks += 1
        if event is None:
            totals.is_lost = True
        elif before is not None and phase != UNCOUNTED:  # the run begins at the first mark
            totals.add(phase, round(before.elapsed_time(event) * 1e6))
        if before is not None:
            self._events.release(before)


@dataclass(slots=True)
class _Totals:
    """The times of a step, as far as they were read."""

    is_lost: bool
    num_marks: int = 0
    reached_ns: int = 0
    discarded_ns: int = 0
    phase_ns: list[int] = field(default_factory=lambda: [0] * len(PHASES))
    intervals: deque[PhaseInterval] = field(default_factory=lambda: deque(maxlen=MAX_INTERVALS))

    def add(self, phase: int, duration_ns: int) -> None:
        self.phase_ns[phase] += duration_ns
        start_ns, self.reached_ns = self.reached_ns, self.reached_ns + duration_ns
        self.intervals.append((phase, start_ns, self.reached_ns))

    def passes_ns(self) -> int:
        return self.phase_ns[FORWARD] + self.phase_ns[BACKWARD]

    def write(self, times: DevicePhaseTimes) -> None:
        times.is_read = True
        if self.is_lost or not self.num_marks:
            return
        times.phase_ns, times.discarded_ns = self.phase_ns, self.discarded_ns
        end_ns = self.reached_ns
        times.intervals = [(phase, a - end_ns, b - end_ns) for phase, a, b in self.intervals]
