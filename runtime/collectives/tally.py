"""Sums over a step's calls. Pure: it sees calls that are settled, and no device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...metrics.catalog.labels import OPS, PHASES
from ...metrics.step_record import CollectiveTotals
from .call import Call
from .groups import Group
from .wire import wire_factor

Interval = tuple[int, int]  # start and end in nanoseconds


@dataclass(slots=True)
class Sums:
    """What the calls of one operation on one group in one phase add up to."""

    op: str
    group: str
    phase: str
    wire_factor: float
    calls: int = 0
    payload_bytes: int = 0
    seconds: list[float] = field(default_factory=list)

    @property
    def wire_bytes(self) -> float:
        """Bytes this rank sent."""
        return self.payload_bytes * self.wire_factor


class Tally:
    """What a number of calls add up to.

    Attributes:
        intervals: The interval of each timed call, by group role.
    """

    def __init__(self, calls: Iterable[Call]) -> None:
        self.intervals: dict[str, list[Interval]] = {}
        self._sums: dict[tuple[int, Group, int], Sums] = {}
        for call in calls:
            self._add(call)

    @property
    def sums(self) -> Iterable[Sums]:
        """The sums by operation, group and phase."""
        return self._sums.values()

    def comm_seconds(self) -> float:
        """Length of the union of all calls' intervals."""
        return union_seconds(pair for pairs in self.intervals.values() for pair in pairs)

    def _add(self, call: Call) -> None:
        key = (call.op, call.group, call.phase)
        sums = self._sums.get(key)
        if sums is None:
            op, group = OPS[call.op], call.group
            factor = wire_factor(op, group.backend, group.size)
            sums = self._sums[key] = Sums(op, group.role, PHASES[call.phase], factor)
        sums.calls += 1
        sums.payload_bytes += call.payload_bytes
        if call.timed:
            sums.seconds.append((call.end_ns - call.start_ns) / 1e9)
            self.intervals.setdefault(sums.group, []).append((call.start_ns, call.end_ns))


class StepComm:
    """A step's communication, summed over the batches in which its calls arrived.

    Attributes:
        seconds: Length of the union of all calls' intervals. Batches follow each other, so that
            their unions add up.
        by_op: The sums over groups and phases, for the run log.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.by_op: dict[str, CollectiveTotals] = {}

    def add(self, tally: Tally) -> None:
        """Count one batch."""
        self.seconds += tally.comm_seconds()
        for sums in tally.sums:
            self.by_op[sums.op] = _added(self.by_op.get(sums.op, _NOTHING), sums)


_NOTHING = CollectiveTotals(calls=0, payload_bytes=0, wire_bytes=0.0, seconds=None)


def _added(known: CollectiveTotals, sums: Sums) -> CollectiveTotals:
    seconds = known.seconds
    if sums.seconds:
        seconds = (seconds or 0.0) + sum(sums.seconds)
    return CollectiveTotals(
        calls=known.calls + sums.calls,
        payload_bytes=known.payload_bytes + sums.payload_bytes,
        wire_bytes=known.wire_bytes + sums.wire_bytes,
        seconds=seconds,
    )


def union_seconds(intervals: Iterable[Interval]) -> float:
    """Return how many seconds lie in at least one of the intervals, given in nanoseconds."""
    covered, reached = 0, -(2**63)
    for start, end in sorted(intervals):
        if end > reached:
            covered += end - max(start, reached)
            reached = end
    return covered / 1e9
