"""Measures the time that this rank's collectives cost: exposed, waiting, transfer, and causes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from ....metrics.catalog import communication
from ....metrics.catalog.labels import OPS, OWN_GROUP, PHASES
from ....metrics.recorder import Recorder
from ...collectives.collective_table import POINT_TO_POINT
from ...collectives.groups import CollectiveCall, RankSet
from .call_sequence import UNEVEN
from .link_estimate import Link, LinkEstimate

# Recent point-to-point messages of one size; the duration of the fastest is the transfer time.
RECENT_MESSAGES = 64
# Most message sizes that are tracked; the least recently used size is dropped.
MAX_MESSAGE_SIZES = 32


@dataclass(slots=True)
class ExposedTimeCauses:
    """The exposed communication time of several collectives, in seconds, split by cause.

    Exposed time is the time in which a collective blocks training. The four causes add up to it.
    A wait that overlaps with compute is hidden, and so has no cause here.

    Attributes:
        imbalance: Waiting for ranks that arrived later, and other time that is no transfer.
        latency: Transfer up to the link's base latency, or of a collective without data.
        redundancy: Transfer of data that an optimal communication pattern would not send.
        bandwidth: The rest of the transfer.
    """

    imbalance: float = 0.0
    latency: float = 0.0
    redundancy: float = 0.0
    bandwidth: float = 0.0

    def add(
        self,
        *,
        exposed: float,
        duration: float,
        wait: float,
        base_latency: float,
        volume_ratio: float | None,
        moves_data: bool = True,
    ) -> None:
        """Split the exposed time of one collective, and add the parts.

        Exposed time that the transfer does not explain is imbalance. Of the exposed transfer, the
        base latency comes first. Of the rest, the fraction 1 - 1/V is redundancy, where V is the
        volume ratio, and what remains is bandwidth.

        Args:
            exposed: Seconds in which the collective blocked training.
            duration: Seconds that the collective took on this rank.
            wait: Seconds of `duration` in which this rank waited for a later one.
            base_latency: Seconds that a collective takes on this link without any data.
            volume_ratio: Bytes sent per step over the reference volume; None while unknown.
            moves_data: Whether the collective moves data. Without data, as in a barrier, all of
                the transfer is latency, even above the base latency.
        """
        transfer = min(exposed, duration - wait)
        latency = min(transfer, base_latency) if moves_data else transfer
        excess = 0.0 if volume_ratio is None or volume_ratio <= 1 else 1 - 1 / volume_ratio
        redundancy = (transfer - latency) * excess
        self.imbalance += exposed - transfer
        self.latency += latency
        self.redundancy += redundancy
        self.bandwidth += transfer - latency - redundancy


@dataclass(slots=True)
class CostTotals:
    """Seconds since the last publication, by group role and by cause.

    Matched and estimated calls add to all of them, calls with an unknown wait to what is exposed
    only.

    Attributes:
        own_exposed: Exposed seconds of zerowatch's own calls, by phase.
    """

    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    own_exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    wait: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    transfer: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    causes: ExposedTimeCauses = field(default_factory=ExposedTimeCauses)

    def add_exposed(self, call: CollectiveCall) -> None:
        """Add the exposed time of a call."""
        role, seconds = call.group.role, call.exposed_ns / 1e9
        self.exposed[role] += seconds
        if role == OWN_GROUP:  # none is asynchronous, so that one phase has all of it
            self.own_exposed[PHASES[call.phase]] += seconds

    def publish(self, recorder: Recorder) -> None:
        """Add to the counters. The caller opens the commit."""
        for spec, by_label in (
            (communication.COMM_EXPOSED_SECONDS, self.exposed),
            (communication.COMM_OWN_EXPOSED_SECONDS, self.own_exposed),
            (communication.COMM_WAIT_SECONDS, self.wait),
            (communication.COMM_TRANSFER_SECONDS, self.transfer),
        ):
            for label, seconds in by_label.items():
                recorder.add(spec, seconds, label)
        causes = self.causes
        if not self.wait:  # a zero would mean that there was no such cause
            return
        for cause, seconds in (
            ("imbalance", causes.imbalance),
            ("latency", causes.latency),
            ("redundancy", causes.redundancy),
            ("bandwidth", causes.bandwidth),
        ):
            recorder.add(communication.COMM_CAUSE_SECONDS, seconds, cause)


class CommCosts:
    """Adds up the costs of the calls of one rank set over one backend, and estimates its link.

    Attributes:
        rank_set: The rank set.
        link: Latency and bandwidth by the calls so far; None before the first.
        wire_bytes: Bytes sent so far, which decide what backend's link is published for a role.
    """

    def __init__(self, rank_set: RankSet) -> None:
        self.rank_set = rank_set
        self.link: Link | None = None
        self.wire_bytes = 0.0
        self._estimate = LinkEstimate()
        self._symmetric: dict[int, list[tuple[float, float]]] = {}  # by op: wire bytes, seconds
        self._bus_bandwidths: dict[int, float] = {}
        self._messages: OrderedDict[int, deque[float]] = OrderedDict()
        self._is_stale = False

    def add_matched(
        self,
        call: CollectiveCall,
        min_seconds: float,
        totals: CostTotals,
        volume_ratio: float | None,
    ) -> None:
        """Add a call of all ranks; what exceeds its shortest duration was waiting."""
        wire_bytes = _wire_bytes(call)
        self.wire_bytes += wire_bytes
        if call.op != UNEVEN:
            self._estimate.add(wire_bytes, min_seconds)
            self._is_stale = True
            self._symmetric.setdefault(call.op, []).append((wire_bytes, min_seconds))
        wait = max(0.0, call.duration_ns / 1e9 - min_seconds)
        self._add(call, wire_bytes, wait, totals, volume_ratio)

    def add_estimated(
        self, call: CollectiveCall, totals: CostTotals, volume_ratio: float | None
    ) -> None:
        """Add an unmatched call; its wait is estimated as the time that the link cannot explain."""
        if not call.timed:
            return
        if OPS[call.op] in POINT_TO_POINT:
            self._add_message(call)
        wire_bytes, duration = _wire_bytes(call), call.duration_ns / 1e9
        wait = max(0.0, duration - self._transfer_seconds(wire_bytes, duration))
        self._add(call, wire_bytes, wait, totals, volume_ratio)

    def add_exposed_only(self, call: CollectiveCall, totals: CostTotals) -> None:
        """Add an unmatched call whose wait is unknown, as exposed time without a cause."""
        if call.timed:
            totals.add_exposed(call)

    def refit(self) -> None:
        """Estimate the link and the bus bandwidths again, if there are new calls."""
        if not self._is_stale:
            return
        self._is_stale = False
        self.link = self._estimate.fit() or self.link
        symmetric, self._symmetric = self._symmetric, {}
        for op, calls in symmetric.items():
            bandwidth = bus_bandwidth(calls)
            if bandwidth is not None:
                self._bus_bandwidths[op] = bandwidth

    def publish(self, recorder: Recorder) -> None:
        """Set the gauges of the link. The caller opens the commit."""
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

    def _transfer_seconds(self, wire_bytes: float, duration: float) -> float:
        """Return how much of its duration a call needs if all members arrive at once."""
        if self.rank_set.size == 1:
            return duration
        if self.link is None:
            return duration if wire_bytes else 0.0  # without data, only waiting takes long
        seconds = self.link.transfer_seconds(wire_bytes)
        return duration if seconds is None else seconds

    def _add(
        self,
        call: CollectiveCall,
        wire_bytes: float,
        wait: float,
        totals: CostTotals,
        volume_ratio: float | None,
    ) -> None:
        role, duration, exposed = call.group.role, call.duration_ns / 1e9, call.exposed_ns / 1e9
        totals.wait[role] += wait
        totals.transfer[role] += duration - wait
        totals.add_exposed(call)
        totals.causes.add(
            exposed=exposed,
            duration=duration,
            wait=wait,
            base_latency=self.link.latency if self.link else 0.0,
            volume_ratio=volume_ratio,
            # zerowatch's own move a few bytes, which no ZeRO stage needs.
            moves_data=wire_bytes > 0 and role != OWN_GROUP,
        )

    def _add_message(self, call: CollectiveCall) -> None:
        """Give the link estimate the fastest of the recent messages of this size."""
        recent = self._messages.setdefault(call.payload_bytes, deque(maxlen=RECENT_MESSAGES))
        self._messages.move_to_end(call.payload_bytes)
        if len(self._messages) > MAX_MESSAGE_SIZES:
            self._messages.popitem(last=False)
        recent.append(call.duration_ns / 1e9)
        self._estimate.add(call.payload_bytes, min(recent))
        self._is_stale = True


def bus_bandwidth(calls: list[tuple[float, float]]) -> float | None:
    """Return the bus bandwidth in bytes per second; None if no call moved any bytes.

    It is the median over the calls, so that one lost packet does not count. Only calls of at least
    half of the largest size count, as small calls show the latency.

    Args:
        calls: Wire bytes of each call, and its shortest duration over the ranks in seconds.
    """
    largest = max((wire for wire, _ in calls), default=0.0)
    rates = [wire / seconds for wire, seconds in calls if wire >= largest / 2 and seconds > 0]
    return median(rates) if largest and rates else None


def _wire_bytes(call: CollectiveCall) -> float:
    """Return the wire bytes of a call on this rank; for a receiver, the received bytes."""
    if OPS[call.op] in POINT_TO_POINT:
        return call.payload_bytes
    return call.payload_bytes * call.group.wire_factor(call.op, call.payload_bytes)
