"""What this rank's collectives cost it, and why: sums that are published together."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from ...metrics.catalog import communication
from ...metrics.catalog.labels import OPS
from ...metrics.recorder import Recorder
from ..collectives.call import CollectiveCall
from ..collectives.groups import RankSet
from ..collectives.ops import POINT_TO_POINT
from .call_sequence import UNEVEN
from .link import Link, LinkEstimate
from .wait_causes import WaitCauses

RECENT_MESSAGES = 64
MOST_MESSAGE_SIZES = 32


@dataclass(slots=True)
class CostTotals:
    """Seconds since the last publication, by group role, and by cause.

    Of calls that could not be compared there are `exposed` seconds only.
    """

    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    wait: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    transfer: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    causes: WaitCauses = field(default_factory=WaitCauses)

    def publish(self, recorder: Recorder) -> None:
        """Add to the counters; to be called within a commit."""
        for spec, by_role in (
            (communication.COMM_EXPOSED_SECONDS, self.exposed),
            (communication.COMM_WAIT_SECONDS, self.wait),
            (communication.COMM_TRANSFER_SECONDS, self.transfer),
        ):
            for role, seconds in by_role.items():
                recorder.add(spec, seconds, role)
        causes = self.causes
        if not self.wait:  # a zero would say that there was no such cause
            return
        for cause, seconds in (
            ("imbalance", causes.imbalance),
            ("latency", causes.latency),
            ("redundancy", causes.redundancy),
            ("bandwidth", causes.bandwidth),
        ):
            recorder.add(communication.COMM_CAUSE_SECONDS, seconds, cause)


class CommCosts:
    """One rank set's collectives on this rank, over one backend.

    Attributes:
        rank_set: The rank set.
        link: What its link can do, from what was matched so far; None at first.
        wire_bytes: Bytes sent so far, by which one account is chosen to stand for its role.
    """

    def __init__(self, rank_set: RankSet) -> None:
        self.rank_set = rank_set
        self.link: Link | None = None
        self.wire_bytes = 0.0
        self._estimate = LinkEstimate()
        self._large: dict[int, list[tuple[float, float]]] = {}
        self._bus_bandwidths: dict[int, float] = {}
        self._messages: OrderedDict[int, deque[float]] = OrderedDict()
        self._is_new = False

    def matched(
        self,
        call: CollectiveCall,
        least_seconds: float,
        totals: CostTotals,
        volume_ratio: float | None,
    ) -> None:
        """Count a symmetric call of which the least duration over the ranks is known."""
        moved = _wire_bytes(call)
        self.wire_bytes += moved
        if call.op != UNEVEN:
            self._estimate.add(moved, least_seconds)
            self._is_new = True
            self._large.setdefault(call.op, []).append((moved, least_seconds))
        wait = max(0.0, call.duration_ns / 1e9 - least_seconds)
        self._count(call, moved, wait, totals, volume_ratio)

    def alone(self, call: CollectiveCall, totals: CostTotals, volume_ratio: float | None) -> None:
        """Count a call without a counterpart: it waited for what the link does not explain."""
        if not call.timed:
            return
        if OPS[call.op] in POINT_TO_POINT:
            self._learn_from_message(call)
        moved, duration = _wire_bytes(call), call.duration_ns / 1e9
        wait = max(0.0, duration - self._needed_seconds(moved, duration))
        self._count(call, moved, wait, totals, volume_ratio)

    def incomparable(self, call: CollectiveCall, totals: CostTotals) -> None:
        """Count a call of which nobody can tell what it was waiting for."""
        if call.timed:
            totals.exposed[call.group.role] += call.exposed_ns / 1e9

    def renew(self) -> None:
        """Work out anew what the link can do, and did lately, if more is known now."""
        if not self._is_new:
            return
        self._is_new = False
        self.link = self._estimate.fit() or self.link
        large, self._large = self._large, {}
        for op, calls in large.items():
            bandwidth = bus_bandwidth(calls)
            if bandwidth is not None:
                self._bus_bandwidths[op] = bandwidth

    def publish(self, recorder: Recorder) -> None:
        """Set the gauges of the link; to be called within a commit."""
        role = self.rank_set.role
        if self.link is not None:
            recorder.set(communication.COMM_LINK_LATENCY, self.link.latency, role)
            if self.link.bandwidth is not None:
                recorder.set(communication.COMM_LINK_BANDWIDTH, self.link.bandwidth, role)
        if self._estimate.best_bandwidth is not None:
            best = self._estimate.best_bandwidth
            recorder.set(communication.COMM_LINK_BEST_BANDWIDTH, best, role)
        for op, bandwidth in self._bus_bandwidths.items():
            recorder.set(communication.COMM_BUS_BANDWIDTH, bandwidth, OPS[op], role)

    def _needed_seconds(self, moved: float, duration: float) -> float:
        """Return how much of its duration a call needed, had all members come at once."""
        if self.rank_set.size == 1:
            return duration
        if self.link is None:
            return duration if moved else 0.0  # without data, only waiting takes long
        needed = self.link.seconds(moved)
        return duration if needed is None else needed

    def _count(
        self,
        call: CollectiveCall,
        moved: float,
        wait: float,
        totals: CostTotals,
        volume_ratio: float | None,
    ) -> None:
        role, duration, exposed = call.group.role, call.duration_ns / 1e9, call.exposed_ns / 1e9
        totals.wait[role] += wait
        totals.transfer[role] += duration - wait
        totals.exposed[role] += exposed
        totals.causes.add(
            exposed=exposed,
            duration=duration,
            wait=wait,
            base_latency=self.link.latency if self.link else 0.0,
            volume_ratio=volume_ratio,
            moves_data=moved > 0,
        )

    def _learn_from_message(self, call: CollectiveCall) -> None:
        """Let the quickest of the recent messages of a size stand for one that nobody waited in."""
        recent = self._messages.setdefault(call.payload_bytes, deque(maxlen=RECENT_MESSAGES))
        self._messages.move_to_end(call.payload_bytes)
        if len(self._messages) > MOST_MESSAGE_SIZES:
            self._messages.popitem(last=False)
        recent.append(call.duration_ns / 1e9)
        self._estimate.add(call.payload_bytes, min(recent))
        self._is_new = True


def _wire_bytes(call: CollectiveCall) -> float:
    """Return the bytes that pass this rank; who receives a message waits for as many."""
    if OPS[call.op] in POINT_TO_POINT:
        return call.payload_bytes
    return call.payload_bytes * call.group.wire_factor(call.op, call.payload_bytes)


def bus_bandwidth(calls: list[tuple[float, float]]) -> float | None:
    """Return bytes per second of (wire bytes, least seconds) of calls; None if none moved any.

    The median call's, so that one lost packet does not show, and of the larger half of sizes only:
    small calls show the latency, not the bandwidth.
    """
    largest = max((wire for wire, _ in calls), default=0.0)
    rates = [wire / seconds for wire, seconds in calls if wire >= largest / 2 and seconds > 0]
    return median(rates) if largest and rates else None
