"""Measures communication time, which is the time in which at least one collective runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .call_batch import CallBatch

Interval = tuple[int, int]  # start and end in nanoseconds
_BEFORE_ALL = -(2**63)


@dataclass(frozen=True, slots=True)
class CommTime:
    """Seconds in which a call of a batch ran and no call of an earlier batch did.

    The seconds are an upper bound if they include a call of which only an upper bound of the end is
    known (`CollectiveCall.is_bound`).

    Attributes:
        seconds: The seconds over all calls.
        by_group: The seconds over the calls of each group role.
    """

    seconds: float
    by_group: dict[str, float]


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
            for call in batch.calls:
                group = call.group
                group.busy_until_ns = group.maybe_busy_until_ns = _BEFORE_ALL
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
        )


class IntervalUnion:
    """Computes the length of a union of intervals that are added in portions, roughly in order."""

    def __init__(self) -> None:
        self._reached = _BEFORE_ALL

    def add(self, intervals: Iterable[Interval]) -> float:
        """Return the seconds that the intervals, given in nanoseconds, add to the union."""
        return self.add_ns(intervals) / 1e9

    def add_ns(self, intervals: Iterable[Interval]) -> int:
        """Return the nanoseconds that the intervals add to the union."""
        covered = 0
        for start, end in sorted(intervals):
            if end > self._reached:
                covered += end - max(start, self._reached)
                self._reached = end
        return covered
