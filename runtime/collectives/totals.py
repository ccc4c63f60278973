"""Sums over a step's calls. Pure: it sees calls that are settled, and no device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...metrics.catalog.labels import OPS, PHASES
from ...metrics.step_record import CollectiveTotals
from .call import CollectiveCall
from .comm_time import CommTime
from .groups import Group


@dataclass(slots=True)
class OpTotals:
    """What the calls of one operation on one group in one phase add up to."""

    op: str
    group: str
    phase: str
    calls: int = 0
    payload_bytes: int = 0
    wire_bytes: float = 0.0
    seconds: list[float] = field(default_factory=list)


class PeriodTotals:
    """What any number of calls add up to, for the metrics.

    Attributes:
        comm_seconds: Length of the union of the calls' intervals, by group role.
    """

    def __init__(self) -> None:
        self.comm_seconds: dict[str, float] = {}
        self._sums: dict[tuple[int, Group, int], OpTotals] = {}

    @property
    def sums(self) -> Iterable[OpTotals]:
        """The sums by operation, group and phase."""
        return self._sums.values()

    def add(self, calls: Iterable[CollectiveCall], comm: CommTime) -> None:
        """Count a batch of calls, and the time that they took."""
        for group, seconds in comm.by_group.items():
            self.comm_seconds[group] = self.comm_seconds.get(group, 0.0) + seconds
        for call in calls:
            key = (call.op, call.group, call.phase)
            sums = self._sums.get(key)
            if sums is None:
                sums = self._sums[key] = _empty_sums(call)
            sums.calls += 1
            sums.payload_bytes += call.payload_bytes
            sums.wire_bytes += call.payload_bytes * _wire_factor(call)
            if call.timed:
                sums.seconds.append((call.end_ns - call.start_ns) / 1e9)


def _empty_sums(call: CollectiveCall) -> OpTotals:
    op, group = OPS[call.op], call.group
    return OpTotals(op, group.role, PHASES[call.phase])


def _wire_factor(call: CollectiveCall) -> float:
    return call.group.wire_factor(call.op, call.payload_bytes)


class StepCommTotals:
    """A step's communication, for its record. Runs for every step, so it does little.

    Attributes:
        seconds: Length of the union of all calls' intervals.
        blocked_ns: For how long training was blocked by calls, in the order of PHASES.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.blocked_ns = [0] * len(PHASES)
        self._by_op: dict[int, list[float]] = {}

    def add(self, calls: Iterable[CollectiveCall], comm: CommTime) -> None:
        """Count a batch of calls, and the time that they took."""
        self.seconds += comm.seconds
        blocked_ns = self.blocked_ns
        for call in calls:
            if call.exposed_ns:
                blocked_ns[call.phase] += call.exposed_ns - call.wait_exposed_ns
                if call.wait_exposed_ns:
                    blocked_ns[call.wait_phase] += call.wait_exposed_ns
            known = self._by_op.get(call.op)
            if known is None:
                known = self._by_op[call.op] = [0, 0, 0.0, 0.0, 0]
            known[0] += 1
            known[1] += call.payload_bytes
            known[2] += call.payload_bytes * _wire_factor(call)
            if call.timed:
                known[3] += call.end_ns - call.start_ns
                known[4] += 1

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which training could do nothing but wait for communication."""
        return sum(self.blocked_ns) / 1e9

    def totals(self) -> dict[str, CollectiveTotals]:
        """The sums by operation; seconds are None where no call could be timed."""
        return {
            OPS[op]: CollectiveTotals(
                calls=int(calls),
                payload_bytes=int(payload),
                wire_bytes=wire,
                seconds=duration_ns / 1e9 if timed else None,
            )
            for op, (calls, payload, wire, duration_ns, timed) in self._by_op.items()
        }
