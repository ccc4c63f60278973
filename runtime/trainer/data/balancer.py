"""Shares that follow the ranks' measured speeds, agreed on now and then between two windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from .busy_time import BusyTime
from .schedule import ShareSchedule
from .share_trial import ShareTrial
from .shares import Shares, even_shares, fitting_shares, gain

EVERY_WINDOWS = 8  # one exchange of four numbers; a median of fewer windows says little
LEAST_GAIN = 0.05  # hosts are a few per cent faster or slower from one minute to the next
NEW_WEIGHT = 0.5  # of what was measured last, against all before
WARM_UP_WINDOWS = 3  # memory is allocated, traces are recorded, code is compiled

Gather = Callable[[Sequence[float]], Any]  # this rank's numbers to an array of all ranks', by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedWindow:
    """A window that was committed.

    Attributes:
        index: Of its batch in the order of the data.
        step: Its number, by which `BusyTime.blocked` tells of it.
        num_samples: This rank's.
        passes_seconds: Wall time of its forward and backward passes on this rank; None where that
            says little, as after a replay.
        seconds: Wall time since the window before.
        most_samples: What this rank can take of a batch at most.
    """

    index: int
    step: int
    num_samples: int
    passes_seconds: float | None
    seconds: float
    most_samples: float = math.inf


class Balancer:
    """Measures this rank and, with all others, changes the schedule.

    Every rank calls `window_ended` after each of its windows, so that all exchange at the same one,
    and all work the same shares out of the same numbers. Shares that make windows no faster, as
    where they take more micro-batches and so more communication, are taken back.

    While shares are to stay even it is `measure` instead; `begin` and `end` lie between.
    """

    def __init__(self, schedule: ShareSchedule, gather: Gather, busy_time: BusyTime) -> None:
        self.schedule = schedule
        self.busy_time = busy_time
        self._gather = gather
        self._num_windows = 0
        self._seconds: list[float] = []
        self._measured = math.nan  # holds until there is something newer
        self._sample_seconds: tuple[float, ...] = ()
        self._trial = ShareTrial()

    def measure(self, window: EndedWindow) -> None:
        """Take a window's time, and nothing more."""
        self._num_windows += 1
        if self._num_windows > WARM_UP_WINDOWS and window.passes_seconds is not None:
            self.busy_time.add(window.step, window.num_samples, window.passes_seconds)

    def begin(self) -> Shares | None:
        """Share out by what was measured so far; return the new shares, if it asks for others.

        Whether they help is for the caller to find out. What they were before is even shares.
        """
        self.forget_times()
        told = self._gather([self._newest(), self.schedule.next_index]).tolist()
        measured, next_indices = zip(*told, strict=True)
        if not _all_known(measured):
            return None
        self._sample_seconds = smoothed(self._sample_seconds, measured)
        no_limits = [math.inf] * len(measured)
        shares = better_shares(self.schedule.latest, self._sample_seconds, no_limits)
        if shares is not None:
            self.schedule.change(int(max(next_indices)), shares)
        return shares

    def end(self) -> Shares | None:
        """Go back to even shares, from the first batch on that no rank has begun to load."""
        self.forget_times()
        even = even_shares(self.schedule.num_samples, self.schedule.num_ranks)
        if self.schedule.latest == even:  # on all ranks alike
            return None
        self.schedule.change(int(self._gather([self.schedule.next_index]).max()), even)
        return even

    def forget_times(self) -> None:
        """Take it that windows are no longer comparable with those before."""
        self._seconds, self._trial = [], ShareTrial()

    def window_ended(self, window: EndedWindow) -> Shares | None:
        """Take a window; return the new shares where some were agreed on."""
        self.measure(window)
        self._seconds.append(window.seconds)
        if len(self._seconds) < EVERY_WINDOWS:
            return None
        usual, self._seconds = median(self._seconds), []
        told = self._gather(
            [self._newest(), self.schedule.next_index, window.most_samples, usual]
        ).tolist()
        measured, next_indices, most, seconds = zip(*told, strict=True)
        shares = self._decide(window.index, measured, most, max(seconds))
        if shares is not None:
            # From the first batch on that no rank has begun to load.
            from_index = int(max(next_indices))
            self._trial.shares_change(self.schedule.latest, from_index, max(seconds))
            self.schedule.change(from_index, shares)
        return shares

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule and what was measured."""
        return {**self.schedule.state_dict(), "sample_seconds": list(self._sample_seconds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved schedule, or evenly where it was one of other ranks or batches."""
        self._trial = ShareTrial()
        if self.schedule.load_state_dict(state):
            self._sample_seconds = tuple(state["sample_seconds"])

    def _newest(self) -> float:
        """Return this rank's seconds per sample, nan before any are known."""
        newer = self.busy_time.take()
        self._measured = self._measured if newer is None else newer
        return self._measured

    def _decide(
        self, index: int, measured: Sequence[float], most: Sequence[float], seconds: float
    ) -> Shares | None:
        if not _all_known(measured):
            return None
        self._sample_seconds = smoothed(self._sample_seconds, measured)
        if self._trial.is_under_way:
            return self._trial.verdict(index + 1 - EVERY_WINDOWS, seconds)
        if self._trial.rests():
            return None
        return better_shares(self.schedule.latest, self._sample_seconds, most)


def better_shares(
    now: Shares,
    sample_seconds: Sequence[float],
    most: Sequence[float],
    least_gain: float = LEAST_GAIN,
) -> Shares | None:
    """Return shares that are worth a change; None where the present ones are good enough.

    Shares beyond what a rank can take are left for the best that it can, whatever the gain.
    """
    if sum(most) < sum(now):
        return None
    best = fitting_shares(sum(now), sample_seconds, most)
    too_much = any(share > limit for share, limit in zip(now, most, strict=True))
    return best if too_much or gain(now, best, sample_seconds) >= least_gain else None


def _all_known(measured: Sequence[float]) -> bool:
    """Whether every rank has something to tell already."""
    return all(each > 0 for each in measured)  # nan is not


def smoothed(before: Sequence[float], measured: Sequence[float]) -> tuple[float, ...]:
    """Return a moving average of what was measured of each rank."""
    if len(before) != len(measured):
        return tuple(measured)
    return tuple(
        (1 - NEW_WEIGHT) * old + NEW_WEIGHT * new for old, new in zip(before, measured, strict=True)
    )
