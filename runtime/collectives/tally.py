"""Sums over a step's calls. Pure: it sees calls that are settled, and no device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...metrics.catalog.labels import OPS, PHASES
from ...metrics.step_record import CollectiveTotals
from .call import Call
from .wire import wire_factor

Key = tuple[str, str]  # op, group
Interval = tuple[int, int]  # start and end in nanoseconds


@dataclass(slots=True)
class Tally:
    """What a number of calls add up to.

    `calls` is keyed by (op, group, phase), bytes by (op, group); `seconds` holds each timed call's
    duration by op, `intervals` its interval by group.
    """

    calls: dict[tuple[str, str, str], int] = field(default_factory=dict)
    payload_bytes: dict[Key, int] = field(default_factory=dict)
    wire_bytes: dict[Key, float] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    intervals: dict[str, list[Interval]] = field(default_factory=dict)

    def add(self, calls: Iterable[Call]) -> None:
        """Count calls."""
        for call in calls:
            op, role = OPS[call.op], call.group.role
            key, phased = (op, role), (op, role, PHASES[call.phase])
            self.calls[phased] = self.calls.get(phased, 0) + 1
            self.payload_bytes[key] = self.payload_bytes.get(key, 0) + call.payload_bytes
            factor = wire_factor(op, call.group.backend, call.group.size)
            self.wire_bytes[key] = self.wire_bytes.get(key, 0.0) + call.payload_bytes * factor
            if call.timed:
                self.seconds.setdefault(op, []).append((call.end_ns - call.start_ns) / 1e9)
                self.intervals.setdefault(role, []).append((call.start_ns, call.end_ns))

    def by_op(self) -> dict[str, CollectiveTotals]:
        """Sum over groups and phases, for the run log."""
        totals = {}
        for op in {key[0] for key in self.calls}:
            seconds = self.seconds.get(op)
            totals[op] = CollectiveTotals(
                calls=sum(n for key, n in self.calls.items() if key[0] == op),
                payload_bytes=sum(n for key, n in self.payload_bytes.items() if key[0] == op),
                wire_bytes=sum(n for key, n in self.wire_bytes.items() if key[0] == op),
                seconds=None if seconds is None else sum(seconds),
            )
        return totals

    def comm_seconds(self) -> float:
        """Length of the union of all calls' intervals."""
        return union_seconds(pair for pairs in self.intervals.values() for pair in pairs)


@dataclass(slots=True)
class StepComm:
    """A step's communication, summed over the batches in which its calls arrived."""

    by_op: dict[str, CollectiveTotals] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, tally: Tally) -> None:
        """Count one batch. Batches follow each other, so their unions add up."""
        self.seconds += tally.comm_seconds()
        for op, totals in tally.by_op().items():
            known = self.by_op.get(op)
            self.by_op[op] = totals if known is None else _sum(known, totals)


def _sum(one: CollectiveTotals, other: CollectiveTotals) -> CollectiveTotals:
    times = [totals.seconds for totals in (one, other) if totals.seconds is not None]
    return CollectiveTotals(
        calls=one.calls + other.calls,
        payload_bytes=one.payload_bytes + other.payload_bytes,
        wire_bytes=one.wire_bytes + other.wire_bytes,
        seconds=sum(times) if times else None,
    )


def union_seconds(intervals: Iterable[Interval]) -> float:
    """Return how many seconds lie in at least one of the intervals, given in nanoseconds."""
    covered, reached = 0, -(2**63)
    for start, end in sorted(intervals):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered / 1e9
