"""Adds up settled calls, by step for the step's record and by period for the metrics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...metrics.catalog.labels import OPS, OWN_GROUP, PHASES
from ...metrics.step_record import CollectiveTotals
from ..common.phase_timer import GENERATE, OTHER
from .comm_time import CommTime
from .groups import CollectiveCall, Group

_ALL_GATHER = OPS.index("all_gather")
# What calls are added up by: the operation, the group and the phase.
_Kind = tuple[int, Group, int]


@dataclass(slots=True)
class OpTotals:
    """Sums over the calls of one operation on one group in one phase."""

    op: str
    group: str
    phase: str
    calls: int = 0
    payload_bytes: int = 0
    wire_bytes: float = 0.0
    seconds: list[float] = field(default_factory=list)


class PeriodTotals:
    """Sums over the calls between two publications of the metrics.

    Attributes:
        seconds: Seconds in which at least one call ran.
        comm_seconds: Seconds in which at least one call ran, by group role.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.comm_seconds: dict[str, float] = {}
        self._sums: dict[_Kind, OpTotals] = {}

    @property
    def sums(self) -> Iterable[OpTotals]:
        """The sums by operation, group and phase."""
        return self._sums.values()

    def add(self, calls: Iterable[CollectiveCall], comm: CommTime) -> None:
        """Add a batch of calls and the time that they took."""
        StepCommTotals().add(calls, comm, period=self)

    def add_time(self, comm: CommTime) -> None:
        """Add the time that a batch of calls took, without the calls."""
        self.seconds += comm.seconds
        for group, seconds in comm.by_group.items():
            self.comm_seconds[group] = self.comm_seconds.get(group, 0.0) + seconds

    def sums_of(self, kind: _Kind) -> OpTotals:
        """Return the sums of one operation on one group in one phase, which the caller adds to."""
        sums = self._sums.get(kind)
        if sums is None:
            op, group, phase = kind
            sums = self._sums[kind] = OpTotals(OPS[op], group.role, PHASES[phase])
        return sums


@dataclass(slots=True)
class _StepOpTotals:
    calls: int = 0
    payload_bytes: int = 0
    wire_bytes: float = 0.0
    timed_calls: int = 0
    duration_ns: int = 0


class StepCommTotals:
    """Sums over the calls of one step, for the step's record.

    The times include all calls. The sums by operation leave out zerowatch's own calls, so that the
    sums can be compared with the plan of an engine.

    Attributes:
        seconds: Seconds in which at least one call ran, without calls whose end is unknown, and
            without calls in coalescing blocks.
        blocked_ns: Nanoseconds in which calls blocked training, by index in PHASES.
        host_blocked_ns: The part of `blocked_ns` in calls that blocked the host. A device may have
            had work left meanwhile.
        is_upper_bound: Whether `seconds` is only an upper bound.
        is_exposed_known: False if the end of a call could not be marked or read, or if calls are
            missing.
        generation_calls: Number of calls issued in generation.
        generation_gathers: Number of all-gathers among them; with ZeRO 3 they gather parameters.
        generation_gathered_bytes: The payload of these all-gathers.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.is_upper_bound = False
        self.is_exposed_known = True
        self.generation_calls = self.generation_gathers = self.generation_gathered_bytes = 0
        self._is_known = True
        self.blocked_ns = [0] * len(PHASES)
        self.host_blocked_ns = [0] * len(PHASES)
        self._by_op: dict[int, _StepOpTotals] = {}

    @property
    def comm_seconds(self) -> float | None:
        """Seconds in which at least one call ran; None if the end of a call is unknown."""
        return self.seconds if self._is_known and self.is_exposed_known else None

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which training only waited for communication."""
        return sum(self.blocked_ns) / 1e9

    def add(
        self,
        calls: Iterable[CollectiveCall],
        comm: CommTime,
        period: PeriodTotals | None = None,
    ) -> None:
        """Add a batch of calls and the time that they took, and to the sums of a period, too.

        One loop serves both, because it runs for every call of the training.
        """
        self.seconds += comm.seconds
        self.is_exposed_known &= comm.is_complete
        period = PeriodTotals() if period is None else period
        period.add_time(comm)
        by_device, by_host = (self.blocked_ns,), (self.blocked_ns, self.host_blocked_ns)
        known: dict[_Kind, tuple[OpTotals, _StepOpTotals | None]] = {}
        for call in calls:
            op, group, phase, payload_bytes = call.op, call.group, call.phase, call.payload_bytes
            timed, is_bound = call.timed, call.is_bound
            if is_bound:
                self.is_upper_bound |= timed
                self._is_known &= timed
            if call.is_lost:
                self.is_exposed_known = False
            exposed_ns = call.exposed_ns
            if exposed_ns:
                wait_exposed_ns = call.wait_exposed_ns
                for blocked_ns in by_host if call.start_event is None else by_device:
                    blocked_ns[phase] += exposed_ns - wait_exposed_ns
                    if wait_exposed_ns:
                        blocked_ns[call.wait_phase] += wait_exposed_ns
            both = known.get((op, group, phase))
            if both is None:
                kind = op, group, phase
                both = known[kind] = period.sums_of(kind), self._sums_of(kind)
            of_period, of_step = both
            wire_bytes = payload_bytes * group.wire_factor(op, payload_bytes)
            of_period.calls += 1
            of_period.payload_bytes += payload_bytes
            of_period.wire_bytes += wire_bytes
            duration_ns = call.end_ns - call.start_ns
            if timed and not is_bound:
                of_period.seconds.append(duration_ns / 1e9)
            if of_step is None:
                continue
            of_step.calls += 1
            of_step.payload_bytes += payload_bytes
            of_step.wire_bytes += wire_bytes
            if timed:
                of_step.timed_calls += 1
                of_step.duration_ns += duration_ns
            if phase == GENERATE:
                self._add_to_generation(call)

    def _sums_of(self, kind: _Kind) -> _StepOpTotals | None:
        """Return the sums of an operation; None for zerowatch's own calls."""
        op, group, _ = kind
        if group.role == OWN_GROUP:
            return None
        sums = self._by_op.get(op)
        if sums is None:
            sums = self._by_op[op] = _StepOpTotals()
        return sums

    def _add_to_generation(self, call: CollectiveCall) -> None:
        self.generation_calls += 1
        if call.op == _ALL_GATHER:
            self.generation_gathers += 1
            self.generation_gathered_bytes += call.payload_bytes

    def device_blocked_ns(self) -> list[int]:
        """Return the nanoseconds in which calls blocked the compute stream, by index in PHASES.

        Calls that block the host count in `other` only. A device that has work left meanwhile does
        it in another phase. One that has none waits with the host, for a rank that is late.
        """
        both = zip(self.blocked_ns, self.host_blocked_ns, strict=True)
        on_device = [blocked - by_host for blocked, by_host in both]
        on_device[OTHER] = self.blocked_ns[OTHER]
        return on_device

    def totals(self) -> dict[str, CollectiveTotals]:
        """Return the sums by operation. Seconds are None if no call could be timed."""
        return {
            OPS[op]: CollectiveTotals(
                calls=sums.calls,
                payload_bytes=sums.payload_bytes,
                wire_bytes=sums.wire_bytes,
                seconds=sums.duration_ns / 1e9 if sums.timed_calls else None,
            )
            for op, sums in self._by_op.items()
        }
