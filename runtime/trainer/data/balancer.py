"""Balances the load: splits the global batch in proportion to the ranks' measured speeds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from ...common.host_group import HostCollectives
from .batch_split import BatchSplit, SplitSchedule, even_split, fastest_split, gain

EVERY_WINDOWS = 8  # windows between exchanges; the median of fewer windows is too noisy
MIN_GAIN = 0.05  # least speedup for a change: a host's speed varies by a few per cent anyway
NEW_WEIGHT = 0.5  # weight of the newest measurement in the moving average
WARM_UP_WINDOWS = 3  # windows not measured, in which memory is allocated and code compiled
_MAX_WINDOWS = 256  # measurements to keep
_RECENT_WINDOWS = 32  # windows used for the median; older measurements may be outdated
_MIN_TRIAL_GAIN = 0.02  # least reduction of a window's wall time; a smaller reduction is noise
_FIRST_PAUSE = 16  # exchanges without a change after a reverted change; doubled each time
_LONGEST_PAUSE = 1024  # exchanges


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedWindow:
    """Measurements of a committed accumulation window.

    Attributes:
        index: Index of the window's batch in the order of the data.
        step: Number of the window's step, as in `BusyTime.add_blocked`.
        num_samples: Samples of this rank.
        passes_seconds: Wall time of the window's forward and backward passes on this rank; None if
            the time is not representative, for example after a replay.
        seconds: Wall time since the previous window.
        max_samples: Largest local batch of this rank.
    """

    index: int
    step: int
    num_samples: int
    passes_seconds: float | None
    seconds: float
    max_samples: float = math.inf


class Balancer:
    """Measures the speed of this rank and, together with all other ranks, changes the split.

    Every rank calls `on_window_end` after each window. So all ranks exchange measurements after the
    same window and compute the same split. If a new split does not make windows faster, for
    example because more micro-batches need more communication, it is reverted.

    While the split has to stay even, the ranks call `measure` instead of `on_window_end`. They call
    `start` to begin balancing and `stop` to return to the even split.
    """

    def __init__(
        self, schedule: SplitSchedule, host_group: HostCollectives, busy_time: BusyTime
    ) -> None:
        self.schedule = schedule
        self.busy_time = busy_time
        self._host_group = host_group
        self._num_windows = 0
        self._seconds: list[float] = []
        self._measured = math.nan  # used until a newer value is known
        self._sample_seconds: tuple[float, ...] = ()
        self._trial = SplitTrial()

    def measure(self, window: EndedWindow) -> None:
        """Add a window's time without changing the split."""
        self._num_windows += 1
        if self._num_windows > WARM_UP_WINDOWS and window.passes_seconds is not None:
            self.busy_time.add(window.step, window.num_samples, window.passes_seconds)

    def start(self) -> BatchSplit | None:
        """Change the split by the measurements so far.

        Returns the new split, or None if the split stays even. The caller evaluates whether the new
        split makes windows faster.
        """
        self.reset_times()
        gathered = self._host_group.all_gather([self._newest(), self.schedule.next_index]).tolist()
        measured, next_indices = zip(*gathered, strict=True)
        if not _all_known(measured):
            return None
        self._sample_seconds = smoothed(self._sample_seconds, measured)
        no_limits = [math.inf] * len(measured)
        split = better_split(self.schedule.latest, self._sample_seconds, no_limits)
        if split is not None:
            self.schedule.change(int(max(next_indices)), split)
        return split

    def stop(self) -> BatchSplit | None:
        """Return to an even split, from the first batch that no rank has started to load."""
        self.reset_times()
        even = even_split(self.schedule.num_samples, self.schedule.num_ranks)
        if self.schedule.latest == even:  # the same on all ranks
            return None
        self.schedule.change(
            int(self._host_group.all_gather([self.schedule.next_index]).max()), even
        )
        return even

    def reset_times(self) -> None:
        """Drop window times, because later windows are not comparable with earlier windows."""
        self._seconds, self._trial = [], SplitTrial()

    def on_window_end(self, window: EndedWindow) -> BatchSplit | None:
        """Add a window; return the new split if it changes."""
        self.measure(window)
        self._seconds.append(window.seconds)
        if len(self._seconds) < EVERY_WINDOWS:
            return None
        typical, self._seconds = median(self._seconds), []
        gathered = self._host_group.all_gather(
            [self._newest(), self.schedule.next_index, window.max_samples, typical]
        ).tolist()
        measured, next_indices, max_samples, seconds = zip(*gathered, strict=True)
        split = self._decide(window.index, measured, max_samples, max(seconds))
        if split is not None:
            # The first batch that no rank has started to load.
            from_index = int(max(next_indices))
            self._trial.on_change(self.schedule.latest, from_index, max(seconds))
            self.schedule.change(from_index, split)
        return split

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule and the measurements."""
        return {**self.schedule.state_dict(), "sample_seconds": list(self._sample_seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a saved schedule, unless the number of ranks or the batch size differs."""
        self._trial = SplitTrial()
        if self.schedule.load_state_dict(state):
            self._sample_seconds = tuple(state["sample_seconds"])

    def _newest(self) -> float:
        """Return this rank's seconds per sample; nan if not yet known."""
        newer = self.busy_time.drain()
        self._measured = self._measured if newer is None else newer
        return self._measured

    def _decide(
        self, index: int, measured: Sequence[float], max_samples: Sequence[float], seconds: float
    ) -> BatchSplit | None:
        if not _all_known(measured):
            return None
        self._sample_seconds = smoothed(self._sample_seconds, measured)
        if self._trial.is_running:
            return self._trial.revert_to(index + 1 - EVERY_WINDOWS, seconds)
        if self._trial.is_paused():
            return None
        return better_split(self.schedule.latest, self._sample_seconds, max_samples)


def better_split(
    now: BatchSplit,
    sample_seconds: Sequence[float],
    max_samples: Sequence[float],
    min_gain: float = MIN_GAIN,
) -> BatchSplit | None:
    """Return a split that is worth a change; None if the gain is below `min_gain`.

    A split that exceeds a rank's limit is always replaced.
    """
    if sum(max_samples) < sum(now):
        return None
    best = fastest_split(sum(now), sample_seconds, max_samples)
    exceeds_limit = any(samples > limit for samples, limit in zip(now, max_samples, strict=True))
    return best if exceeds_limit or gain(now, best, sample_seconds) >= min_gain else None


def _all_known(measured: Sequence[float]) -> bool:
    """Return whether every rank has a measurement."""
    return all(each > 0 for each in measured)  # nan > 0 is False


def smoothed(before: Sequence[float], measured: Sequence[float]) -> tuple[float, ...]:
    """Return an exponential moving average of each rank's measurements."""
    if len(before) != len(measured):
        return tuple(measured)
    return tuple(
        (1 - NEW_WEIGHT) * old + NEW_WEIGHT * new for old, new in zip(before, measured, strict=True)
    )


class BusyTime:
    """Seconds per sample of this rank, without the time in which it waits for other ranks.

    Attributes:
        collectives_inside: Whether forward and backward contain communication. Otherwise no
            blocked time is expected.
    """

    def __init__(self, *, collectives_inside: bool = True) -> None:
        self.collectives_inside = collectives_inside
        self._windows: deque[tuple[int, int, float]] = deque(maxlen=_MAX_WINDOWS)
        self._blocked: deque[tuple[int, float]] = deque(maxlen=_MAX_WINDOWS)

    def add(self, step: int, num_samples: int, seconds: float) -> None:
        """Add a window: this rank's samples, and the wall time of forward and backward passes."""
        self._windows.append((step, num_samples, seconds))

    def add_blocked(self, step: int, seconds: float) -> None:
        """Add the time for which collectives blocked training in a window's passes.

        May be called on any thread.
        """
        self._blocked.append((step, seconds))

    def drain(self) -> float | None:
        """Return the recent median seconds per sample; None without new windows."""
        if not self.collectives_inside:
            known = [(samples, seconds) for _, samples, seconds in self._windows]
            self._windows.clear()
        else:
            known = self._drain_unblocked()
        if not known:
            return None
        recent = known[-_RECENT_WINDOWS:]
        return median(max(seconds, 0.0) / samples for samples, seconds in recent)

    def _drain_unblocked(self) -> list[tuple[int, float]]:
        """Return the windows whose blocked time is known, and keep later windows for the future."""
        blocked = dict(self._blocked.popleft() for _ in range(len(self._blocked)))
        if not blocked:
            return []
        known = [
            (samples, seconds - blocked[step])
            for step, samples, seconds in self._windows
            if step in blocked
        ]
        last = max(blocked)
        self._windows = deque(
            (each for each in self._windows if each[0] > last), maxlen=_MAX_WINDOWS
        )
        return known


class SplitTrial:
    """Tries one change of the split at a time; its state is the same on all ranks.

    Attributes:
        is_running: Whether a change is being evaluated.
    """

    def __init__(self) -> None:
        self.is_running = False
        self._before: BatchSplit = ()
        self._seconds_before = 0.0
        self._from_index = 0
        self._pause = 0
        self._next_pause = _FIRST_PAUSE
        self._is_reverting = False

    def on_change(self, before: BatchSplit, from_index: int, seconds: float) -> None:
        """Start the trial of a split that applies from a batch on.

        Args:
            before: The split in use until then.
            from_index: First batch of the new split.
            seconds: Time of a window with the split in use until then.
        """
        if self._is_reverting:
            self._is_reverting = False
            return
        self.is_running = True
        self._before, self._from_index, self._seconds_before = before, from_index, seconds

    def revert_to(self, first_index: int, seconds: float) -> BatchSplit | None:
        """Evaluate the trial with windows from this batch on.

        Returns the split to go back to, or None to keep the present split. Windows that started
        before the change are not evaluated.
        """
        if first_index < self._from_index:
            return None
        self.is_running = False
        if seconds <= (1 - _MIN_TRIAL_GAIN) * self._seconds_before:
            self._next_pause = _FIRST_PAUSE
            return None
        self._is_reverting = True
        self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, _LONGEST_PAUSE)
        return self._before

    def is_paused(self) -> bool:
        """Return whether this exchange must not change the split; called once per exchange."""
        self._pause = max(0, self._pause - 1)
        return self._pause > 0
