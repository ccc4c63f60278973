"""Measures communication time, which is the time in which at least one collective runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .call_batch import CallBatch
from .groups import BEFORE_ALL, NEVER, Group

Interval = tuple[int, int]  # start and end in nanoseconds


@dataclass(frozen=True, slots=True)
class CommTime:
    """Seconds in which a call of a batch ran and no call of an earlier batch did.

    The seconds are an upper bound if they include a call of which only an upper bound of the end is
    known (`CollectiveCall.is_bound`).

    Attributes:
        seconds: The seconds over all calls.
        by_group: The seconds over the calls of each group role.
        is_complete: Whether the batch has all calls, so that no time is missing.
    """

    seconds: float
    by_group: dict[str, float]
    is_complete: bool = True


class CommTimeCounter:
    """Measures the communication time of successive batches. Overlapping time counts once.

    There is one exception. If a batch is timed by events, its times are relative to its own anchor,
    and cannot be compared with the times of another batch. Time in which calls of two such batches
    overlap counts twice.
    """

    def __init__(self) -> None:
        self._all = IntervalUnion()
        self._by_group: dict[str, IntervalUnion] = {}
        self._num_batches = 0

    def measure(self, batch: CallBatch) -> CommTime:
        """Settle the calls of a batch whose events were read, and return the time they add."""
        if batch.anchor is not None:
            self._all, self._by_group = IntervalUnion(), {}
            for group in {call.group for call in batch.calls if call.start_event is not None}:
                _change_anchor(group)
        self._num_batches += 1
        by_group: dict[str, list[Interval]] = {}
        for call in batch.calls:
            call.settle(self._num_batches)
            if call.timed:
                by_group.setdefault(call.group.role, []).append((call.start_ns, call.end_ns))
        everything = [interval for intervals in by_group.values() for interval in intervals]
        return CommTime(
            self._all.add(everything),
            {
                group: self._by_group.setdefault(group, IntervalUnion()).add(intervals)
                for group, intervals in by_group.items()
            },
            batch.is_complete,
        )


def _change_anchor(group: Group) -> None:
    """Forget the times of earlier calls, which were relative to another anchor.

    If a call ended after that anchor, when is not known on the new scale.
    """
    ran_over = max(group.busy_until_ns, group.maybe_busy_until_ns) > 0
    group.busy_until_ns = BEFORE_ALL
    group.maybe_busy_until_ns = NEVER if ran_over else BEFORE_ALL


class IntervalUnion:
    """Computes the length of a union of intervals that are added in portions, roughly in order."""

    def __init__(self) -> None:
        self._reached = BEFORE_ALL

    def add(self, intervals: Iterable[Interval]) -> float:
        """Return the seconds that the intervals, given in nanoseconds, add to the union."""
        return self.add_ns(intervals) / 1e9

    def add_ns(self, intervals: Iterable[Interval]) -> int:
        """Return the nanoseconds that the intervals add to the union."""
        covered, reached = 0, self._reached
        for start, end in sorted(intervals):  # a plain loop: this runs for every call
            if end > reached:
                covered += end - (start if start > reached else reached)
                reached = end
        self._reached = reached
        return covered
