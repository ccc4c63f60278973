"""Metrics of one rank over an interval of training: the difference of two snapshots. Pure.

Exposed communication is published five to seven seconds late. An interval right after a change
therefore contains some of the time before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ....metrics.catalog import communication, devices, generation, memory, overhead, training
from ....metrics.catalog.labels import (
    CAUSE,
    COMPARED_PHASES,
    NON_TRAINING_PHASES,
    OWN_GROUP,
    PHASES,
)
from ....metrics.catalog.spec import MetricSpec
from ....metrics.recorder import Snapshot

CPU = "cpu"
# The phases whose time the tuner can shorten.
_TUNED_PHASES = tuple(p for p in PHASES if p not in (*NON_TRAINING_PHASES, "generate"))
_WORLD_SIZE = training.RUN_INFO.label_names.index("world_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsDelta:
    """One rank's metrics over an interval of training. A missing metric is None.

    Ratios are shares of training time without evaluation, generation and checkpoints, unless stated
    otherwise. What collectives cost in generation is left out, but not its bytes.

    Attributes:
        stale: Whether the metrics were not updated in the interval. If so, nothing else is known.
        seconds: Training time of the interval.
        steps: Optimizer steps in the interval.
        phase_ratios: Share of each phase that occurred.
        exposed_ratio: Waiting for collectives, without `own_transfer_ratio`.
        own_transfer_ratio: Transfer of zerowatch's own collectives, such as the votes of a
            TrainingRun's ranks. Changes of the training's traffic do not shorten this transfer. If
            such a collective waits for a late rank, the wait is part of `exposed_ratio`.
        own_exposed_ratios: Waiting in zerowatch's own collectives, by phase. Votes are in forward
            and backward from ZeRO 2 on, the rest in `other`.
        comm_ratio: Time with collectives in flight, including hidden collectives. zerowatch's own
            collectives are left out.
        cause_ratios: Share of waiting for compared collectives, by cause; without
            `own_transfer_ratio`.
        coverage: Recorded collectives divided by issued collectives. Of the values at both ends of
            the interval, the lower one.
        step_wire_bytes: Bytes that this rank sent in a step, without zerowatch's own collectives.
        step_calls: Collectives in a step, without zerowatch's own.
        link_bandwidth: Bytes per second in the group that sends the most bytes.
        link_latency: Seconds of the smallest collective in that group.
        on_cpu: Whether the CPU is the only device; None if no device is known.
        device_utilization: Share of wall time in which the training device was busy, over the whole
            interval.
        headroom_ratio: Free share of the memory limit, on the device with the smallest share.
        device_headroom_ratio: Free share of the memory limit of the training device.
        oom_risk: The highest OOM risk of any device.
        straggler_score: Score of this rank's slowest phase.
        offload_ratio: Time in code that offloads.
        tokens_per_sample: Mean over the interval.
        world_size: Ranks of the job.
    """

    stale: bool = False
    seconds: float | None = None
    steps: float | None = None
    phase_ratios: Mapping[str, float] = field(default_factory=dict)
    exposed_ratio: float | None = None
    own_transfer_ratio: float = 0.0
    own_exposed_ratios: Mapping[str, float] = field(default_factory=dict)
    comm_ratio: float | None = None
    cause_ratios: Mapping[str, float] = field(default_factory=dict)
    coverage: float | None = None
    step_wire_bytes: float | None = None
    step_calls: float | None = None
    link_bandwidth: float | None = None
    link_latency: float | None = None
    on_cpu: bool | None = None
    device_utilization: float | None = None
    headroom_ratio: float | None = None
    device_headroom_ratio: float | None = None
    oom_risk: float | None = None
    straggler_score: float | None = None
    offload_ratio: float | None = None
    tokens_per_sample: float | None = None
    world_size: int | None = None


def metrics_between(before: Snapshot, after: Snapshot) -> MetricsDelta:
    """Return the metrics between two snapshots of one rank.

    Exposed communication is published every few seconds, so the snapshots should be at least 20 s
    apart.
    """
    interval = _Interval(before=before, after=after)
    updated = [one.value(overhead.WATCH_LAST_UPDATE_TIMESTAMP) for one in (before, after)]
    if None in updated or updated[0] == updated[1]:
        return MetricsDelta(stale=True)
    phases = {phase: interval.increase(training.PHASE_SECONDS, phase) for phase in PHASES}
    counted = known_values({phase: phases[phase] for phase in _TUNED_PHASES})
    seconds = sum(counted.values())
    reading = MetricsDelta(
        seconds=seconds or None,
        steps=interval.increase(training.STEPS),
        phase_ratios=_ratios(counted, seconds),
        offload_ratio=_ratio(interval.total_increase(memory.OFFLOAD_SECONDS), seconds),
        tokens_per_sample=_ratio(
            interval.increase(training.TOKENS), interval.increase(training.SAMPLES)
        ),
        world_size=_world_size(after),
    )
    return _with_device(_with_communication(reading, interval), interval)


def _with_communication(reading: MetricsDelta, interval: _Interval) -> MetricsDelta:
    exposed = interval.total_increase(communication.COMM_EXPOSED_SECONDS)
    comm = interval.total_increase(communication.COMM_UNION_SECONDS)
    own_comm = interval.increase(communication.COMM_SECONDS, OWN_GROUP) or 0.0
    training_comm = _without(comm, own_comm)  # own calls overlap with no others
    if exposed == 0 and comm:
        exposed = None  # no cross-rank comparison fell into the interval, or its thread is dead
    # In generation a collective is exposed nearly all of its time: it waits for each gather.
    generated = interval.total_increase(generation.GENERATE_COMM_EXPOSED_SECONDS) or 0.0
    training_comm = _without(training_comm, generated)
    all_exposed, exposed = exposed, _without(exposed, generated)
    training_share = _ratio(exposed, all_exposed)
    # A publication may contain a little more than the interval.
    ratio = _ratio(exposed, reading.seconds)
    scale = 1.0 if ratio is None or ratio <= 1 else 1 / ratio
    causes = {
        cause: None
        if exposed is None
        else interval.increase(communication.COMM_CAUSE_SECONDS, cause)
        for cause in CAUSE.values
    }
    own_transfer = interval.increase(communication.COMM_TRANSFER_SECONDS, OWN_GROUP) or 0.0
    if causes["latency"] is not None:  # all of their transfer is
        own_transfer = min(own_transfer, causes["latency"])
        causes["latency"] -= own_transfer
    own_ratio = _ratio(scale * own_transfer, reading.seconds) or 0.0
    own = {
        phase: interval.increase(communication.COMM_OWN_EXPOSED_SECONDS, phase)
        for phase in reading.phase_ratios
    }
    wire_bytes = interval.total_increase(communication.COLLECTIVE_WIRE_BYTES, but=(OWN_GROUP,))
    calls = interval.total_increase(communication.COLLECTIVE_CALLS, but=(OWN_GROUP, "generate"))
    group = interval.busiest_group()
    return replace(
        reading,
        exposed_ratio=None if ratio is None else max(0.0, min(ratio, 1.0) - own_ratio),
        own_transfer_ratio=own_ratio,
        own_exposed_ratios=_ratios(own, reading.seconds, scale),
        comm_ratio=_ratio(training_comm, reading.seconds),
        cause_ratios=_ratios(causes, reading.seconds, scale * (training_share or 0.0)),
        coverage=interval.lower(communication.COMM_COVERAGE_RATIO),
        step_wire_bytes=_ratio(wire_bytes, reading.steps),
        step_calls=_ratio(calls, reading.steps),
        link_bandwidth=interval.after.value(communication.COMM_LINK_BANDWIDTH, group),
        link_latency=interval.after.value(communication.COMM_LINK_LATENCY, group),
    )


def _without(seconds: float | None, part: float) -> float | None:
    """Return the seconds less a part, which is measured apart and may exceed them a little."""
    return None if seconds is None else max(0.0, seconds - part)


def _with_device(reading: MetricsDelta, interval: _Interval) -> MetricsDelta:
    after = interval.after
    named = sorted(after.values.get(devices.DEVICE_UTILIZATION, {}))
    names = [label[0] for label in named]
    # A rank with a GPU has a series for its CPU, too.
    device = next((name for name in names if name != CPU), CPU if CPU in names else None)
    headrooms = _headroom_ratios(after)
    scores = [after.value(communication.STRAGGLER_SCORE, phase) for phase in COMPARED_PHASES]
    risks = after.values.get(memory.OOM_RISK, {})
    busy, idle = (
        interval.increase(devices.DEVICE_SECONDS, device or "", state) for state in ("busy", "idle")
    )
    return replace(
        reading,
        on_cpu=None if device is None else device == CPU,
        device_utilization=_ratio(busy, (busy or 0.0) + (idle or 0.0)),
        headroom_ratio=min(headrooms.values(), default=None),
        device_headroom_ratio=headrooms.get(device or ""),
        oom_risk=max(risks.values(), default=None),
        straggler_score=max((each for each in scores if each is not None), default=None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Interval:
    """Two snapshots of one rank, the earlier first."""

    before: Snapshot
    after: Snapshot

    def increase(self, spec: MetricSpec, *labels: str) -> float | None:
        """Return the increase of a counter; None if the counter is missing or was reset."""
        end = self.after.value(spec, *labels)
        increase = -1.0 if end is None else end - (self.before.value(spec, *labels) or 0.0)
        return increase if increase >= 0 else None

    def total_increase(self, spec: MetricSpec, *, but: tuple[str, ...] = ()) -> float | None:
        """Return the increase of a counter, summed over series without the label values `but`."""
        every = self.after.values.get(spec, {})
        series = [labels for labels in every if not set(but).intersection(labels)]
        parts = [self.increase(spec, *labels) for labels in series]
        known = [part for part in parts if part is not None]
        return sum(known) if known else None

    def busiest_group(self) -> str:
        """Return the group that sent most bytes; "" if no group sent any."""
        sent: dict[str, float] = {}
        spec = communication.COLLECTIVE_WIRE_BYTES
        for op, group in self.after.values.get(spec, {}):
            if group != OWN_GROUP:
                sent[group] = sent.get(group, 0.0) + (self.increase(spec, op, group) or 0.0)
        return max(sent, key=lambda group: sent[group], default="")

    def lower(self, spec: MetricSpec) -> float | None:
        """Return the lower of a gauge's values at both ends; None without a value at the end."""
        end, start = self.after.value(spec), self.before.value(spec)
        return end if end is None or start is None else min(start, end)


def _headroom_ratios(snapshot: Snapshot) -> dict[str, float]:
    """Return, by device, the share of the memory limit that the next peak leaves free."""
    ratios = {}
    for (device,), free in snapshot.values.get(memory.MEMORY_HEADROOM, {}).items():
        limit = snapshot.value(memory.MEMORY_LIMIT, device)
        if limit:
            ratios[device] = free / limit
    return ratios


def _world_size(snapshot: Snapshot) -> int | None:
    labels = next(iter(snapshot.values.get(training.RUN_INFO, {})), None)
    text = labels[_WORLD_SIZE] if labels else ""
    return int(text) if text.isdigit() else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _ratios(
    parts: Mapping[str, float | None], whole: float | None, scale: float = 1.0
) -> dict[str, float]:
    """Return the known parts as shares of a whole, times a factor."""
    ratios = {name: _ratio(part, whole) for name, part in parts.items()}
    return {name: scale * ratio for name, ratio in known_values(ratios).items()}


def known_values(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}
