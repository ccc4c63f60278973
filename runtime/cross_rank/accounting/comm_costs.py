"""Adds up the exposed, waiting and transfer time of this rank's collectives, and its causes."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

from ....metrics.catalog import communication
from ....metrics.catalog.labels import OPS, OWN_GROUP, PHASES
from ....metrics.recorder import Recorder
from ...collectives.collective_table import POINT_TO_POINT
from ...collectives.groups import CollectiveCall, RankSet
from ...common.phase_timer import NON_TRAINING
from .call_sequence import UNEVEN
from .link_estimate import Link, LinkEstimate

# Number of recent point-to-point messages that are kept of each size. The duration of the fastest
# message is taken as the transfer time of that size.
RECENT_MESSAGES = 64
# Maximum number of message sizes that are tracked. The least recently used size is dropped.
MAX_MESSAGE_SIZES = 32
# Number of recent steps with exact calls over which the mean of an operation and size goes, and the
# maximum number of such means. The least recently used mean is dropped.
RECENT_EXACT_STEPS = 4
MAX_MEANS = 1024


@dataclass(slots=True)
class ExposedTimeCauses:
    """The exposed communication time of several collectives, in seconds, split by cause.

    Exposed time is the time in which a collective blocks training. The four causes add up to the
    exposed time. A wait that overlaps with compute is hidden, and is not counted for any cause.

    Attributes:
        imbalance: Waiting for ranks that arrived later, and other time without a transfer.
        latency: The part of each transfer up to the link's base latency. For a collective without
            data, the whole transfer.
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

        Exposed time that the transfer does not explain counts as imbalance. The exposed transfer
        counts as latency up to the base latency. If V is the volume ratio, the fraction 1 - 1/V of
        the remaining transfer counts as redundancy. The remainder counts as bandwidth.

        Args:
            exposed: Seconds in which the collective blocked training.
            duration: Seconds that the collective took on this rank.
            wait: Seconds of `duration` in which this rank waited for a rank that arrived later.
            base_latency: Seconds that a collective without data takes on this link.
            volume_ratio: Bytes sent per step, divided by the reference volume. None while unknown.
            moves_data: Whether the collective moves data. If it does not, like a barrier, the
                whole transfer counts as latency, even the part above the base latency.
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

    A matched or estimated call is added to every total. A call whose wait is unknown is added to
    the exposed time only. Calls of evaluations and checkpoints count as 0 seconds in all totals,
    as the training time that they are compared with excludes them.

    Attributes:
        exposed: Seconds in which calls blocked training, by group role.
        own_exposed: Exposed seconds of zerowatch's own calls, by phase.
        wait: Seconds in which this rank waited for other ranks, by group role.
        transfer: The other seconds of the calls, by group role.
        causes: The exposed seconds of all group roles, split by cause.
    """

    exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    own_exposed: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    wait: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    transfer: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    causes: ExposedTimeCauses = field(default_factory=ExposedTimeCauses)

    def add_exposed(self, call: CollectiveCall) -> None:
        """Add the exposed time of a call."""
        role, seconds = call.group.role, _exposed_seconds(call)
        self.exposed[role] += seconds
        if role == OWN_GROUP:  # these calls are synchronous, so the time is all in one phase
            self.own_exposed[PHASES[call.phase]] += seconds

    def publish(self, recorder: Recorder) -> None:
        """Add the totals to the counters. The caller opens the commit."""
        for spec, by_label in (
            (communication.COMM_EXPOSED_SECONDS, self.exposed),
            (communication.COMM_OWN_EXPOSED_SECONDS, self.own_exposed),
            (communication.COMM_WAIT_SECONDS, self.wait),
            (communication.COMM_TRANSFER_SECONDS, self.transfer),
        ):
            for label, seconds in by_label.items():
                recorder.add(spec, seconds, label)
        causes = self.causes
        # Without any known wait the causes are unknown. Publishing 0 would claim that there were no
        # exposed seconds of any cause.
        if not self.wait:
            return
        for cause, seconds in (
            ("imbalance", causes.imbalance),
            ("latency", causes.latency),
            ("redundancy", causes.redundancy),
            ("bandwidth", causes.bandwidth),
        ):
            recorder.add(communication.COMM_CAUSE_SECONDS, seconds, cause)


@dataclass(slots=True)
class _StepCost:
    """The mean duration and wait of the exact calls of one step, in seconds."""

    batch: int
    num_calls: int = 0
    duration: float = 0.0
    wait: float = 0.0

    def add(self, duration: float, wait: float) -> None:
        self.num_calls += 1
        self.duration += (duration - self.duration) / self.num_calls
        self.wait += (wait - self.wait) / self.num_calls


class _RecentCost:
    """The costs of the exact calls of one operation and size in the last RECENT_EXACT_STEPS steps.

    Each step counts alike, because one call of a step may wait for the other ranks on behalf of all
    others. The first step is left out: communicators are created in it, and ranks start at
    different times.
    """

    def __init__(self) -> None:
        self._first_batch: int | None = None
        self._steps: deque[_StepCost] = deque(maxlen=RECENT_EXACT_STEPS)

    def add(self, batch: int, duration: float, wait: float) -> None:
        if self._first_batch is None:
            self._first_batch = batch
        if batch == self._first_batch:
            return
        if not self._steps or self._steps[-1].batch != batch:
            self._steps.append(_StepCost(batch))
        self._steps[-1].add(duration, wait)

    def mean(self) -> tuple[float, float] | None:
        """Return the duration and wait of an average call; None before the second step."""
        if not self._steps:
            return None
        steps, num_steps = self._steps, len(self._steps)
        duration = sum(step.duration for step in steps) / num_steps
        return duration, sum(step.wait for step in steps) / num_steps


class CommCosts:
    """Adds up the costs of the calls of one rank set over one backend, and estimates its link.

    Attributes:
        rank_set: The rank set.
        link: Latency and bandwidth, estimated from the calls so far. None before the first
            estimate.
        wire_bytes: Bytes sent so far. If a role uses several backends, only the link of the backend
            that has sent the most bytes is published.
    """

    def __init__(self, rank_set: RankSet) -> None:
        self.rank_set = rank_set
        self.link: Link | None = None
        self.wire_bytes = 0.0
        self._estimate = LinkEstimate()
        self._symmetric: dict[int, list[tuple[float, float]]] = {}  # by op: wire bytes, seconds
        self._bus_bandwidths: dict[int, float] = {}
        self._recent: OrderedDict[tuple[int, int], _RecentCost] = OrderedDict()  # by op and bytes
        self._messages: OrderedDict[int, deque[float]] = OrderedDict()
        self._is_stale = False

    def add_matched(
        self,
        call: CollectiveCall,
        min_seconds: float,
        totals: CostTotals,
        volume_ratio: float | None,
    ) -> None:
        """Add a call that was found on all ranks.

        The shortest duration over the ranks is taken as the time of the transfer. The rest of this
        rank's duration is its wait.

        Args:
            call: The call on this rank.
            min_seconds: The shortest duration of the call over all ranks.
            totals: Receives the costs.
            volume_ratio: Bytes sent per step, divided by the reference volume. None while unknown.
        """
        wire_bytes = _wire_bytes(call)
        self.wire_bytes += wire_bytes
        if call.op != UNEVEN:
            self._estimate.add(wire_bytes, min_seconds)
            self._is_stale = True
            self._symmetric.setdefault(call.op, []).append((wire_bytes, min_seconds))
        duration = call.duration_ns / 1e9
        wait = max(0.0, duration - min_seconds)
        self._add_to_recent(call, duration, wait)
        self._add(call, wire_bytes, duration, wait, totals, volume_ratio)

    def add_estimated(
        self, call: CollectiveCall, totals: CostTotals, volume_ratio: float | None
    ) -> None:
        """Add an unmatched call, whose wait is estimated.

        The wait is this rank's duration minus the transfer time that the link estimate gives.
        """
        if not call.timed:
            return
        if OPS[call.op] in POINT_TO_POINT:
            self._add_message(call)
        wire_bytes, duration = _wire_bytes(call), call.duration_ns / 1e9
        wait = max(0.0, duration - self._transfer_seconds(wire_bytes, duration))
        self._add_to_recent(call, duration, wait)
        self._add(call, wire_bytes, duration, wait, totals, volume_ratio)

    def add_inexact(
        self, call: CollectiveCall, totals: CostTotals, volume_ratio: float | None
    ) -> None:
        """Add a call of whose duration some rank has only an upper bound.

        Its duration and wait count as the mean over the last RECENT_EXACT_STEPS steps with exact
        calls of its operation and size, without the first such step. Before the second, only its
        exposed time is added.
        """
        if not call.timed:
            return
        recent = self._recent.get((call.op, call.payload_bytes))
        mean = None if recent is None else recent.mean()
        if mean is None:
            totals.add_exposed(call)
        else:
            self._add(call, _wire_bytes(call), *mean, totals, volume_ratio)

    def add_exposed_only(self, call: CollectiveCall, totals: CostTotals) -> None:
        """Add the exposed time of an unmatched call. Its wait and causes stay unknown."""
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

    def withdraw(self, recorder: Recorder) -> None:
        """Remove the gauges of the link, as its ranks are no longer compared."""
        if self.link is None:
            return
        role = self.rank_set.role
        for spec in (
            communication.COMM_LINK_LATENCY,
            communication.COMM_LINK_BANDWIDTH,
            communication.COMM_LINK_BEST_BANDWIDTH,
        ):
            recorder.remove(spec, role)
        for op in self._bus_bandwidths:
            recorder.remove(communication.COMM_BUS_BANDWIDTH, OPS[op], role)

    def _transfer_seconds(self, wire_bytes: float, duration: float) -> float:
        """Return the seconds that a call needs if all members arrive at the same time.

        The whole duration is returned if the transfer time cannot be estimated.
        """
        if self.rank_set.size == 1:
            return duration
        if self.link is None:
            return duration if wire_bytes else 0.0  # a call without data takes long only by waiting
        seconds = self.link.transfer_seconds(wire_bytes)
        return duration if seconds is None else seconds

    def _add(
        self,
        call: CollectiveCall,
        wire_bytes: float,
        duration: float,
        wait: float,
        totals: CostTotals,
        volume_ratio: float | None,
    ) -> None:
        role, counts = call.group.role, call.phase not in NON_TRAINING
        totals.wait[role] += wait if counts else 0.0  # a wait of 0 is known, too
        totals.transfer[role] += duration - wait if counts else 0.0
        totals.add_exposed(call)
        totals.causes.add(
            exposed=_exposed_seconds(call),
            duration=duration,
            wait=wait,
            base_latency=self.link.latency if self.link else 0.0,
            volume_ratio=volume_ratio,
            # zerowatch's own calls move a few bytes that do not belong to any ZeRO stage.
            moves_data=wire_bytes > 0 and role != OWN_GROUP,
        )

    def _add_to_recent(self, call: CollectiveCall, duration: float, wait: float) -> None:
        if call.start_event is None:
            return  # on the host every call is exact
        key = (call.op, call.payload_bytes)
        self._recent.setdefault(key, _RecentCost()).add(call.batch, duration, wait)
        self._recent.move_to_end(key)
        if len(self._recent) > MAX_MEANS:
            self._recent.popitem(last=False)

    def _add_message(self, call: CollectiveCall) -> None:
        """Add the shortest duration of the recent messages of this size to the link estimate."""
        recent = self._messages.setdefault(call.payload_bytes, deque(maxlen=RECENT_MESSAGES))
        self._messages.move_to_end(call.payload_bytes)
        if len(self._messages) > MAX_MESSAGE_SIZES:
            self._messages.popitem(last=False)
        recent.append(call.duration_ns / 1e9)
        self._estimate.add(call.payload_bytes, min(recent))
        self._is_stale = True


def _exposed_seconds(call: CollectiveCall) -> float:
    return 0.0 if call.phase in NON_TRAINING else call.exposed_ns / 1e9


def bus_bandwidth(calls: list[tuple[float, float]]) -> float | None:
    """Return the bus bandwidth in bytes per second; None if no call moved any bytes.

    The result is the median over the calls, so one lost packet does not change it. Calls smaller
    than half of the largest call are left out, because they mostly show the latency.

    Args:
        calls: The wire bytes of each call, and its shortest duration over the ranks in seconds.
    """
    largest = max((wire for wire, _ in calls), default=0.0)
    rates = [wire / seconds for wire, seconds in calls if wire >= largest / 2 and seconds > 0]
    return median(rates) if largest and rates else None


def _wire_bytes(call: CollectiveCall) -> float:
    """Return the wire bytes of a call on this rank. For a receive, return the received bytes."""
    if OPS[call.op] in POINT_TO_POINT:
        return call.payload_bytes
    factor: float = call.group.wire_factor(call.op, call.payload_bytes)
    return call.payload_bytes * factor
