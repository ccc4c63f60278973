"""What the metrics of one rank say of a stretch of training: two snapshots, one Reading. Pure.

Communication that training waited for is known some five to seven seconds after it, so a stretch
that follows a change closely still holds some of what was before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from ....metrics.catalog import communication, devices, memory, overhead, training
from ....metrics.catalog.labels import CAUSE, COMPARED_PHASES, PHASES
from ....metrics.catalog.spec import MetricSpec
from ....metrics.snapshot import Snapshot

CPU = "cpu"
NOT_TRAINING = ("eval", "checkpoint")
_WORLD_SIZE = training.RUN_INFO.label_names.index("world_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsDelta:
    """One rank's stretch of training. None where a metric is missing, which is never 0.

    Ratios are shares of training time, evaluation and checkpoints left out, unless said otherwise.

    Attributes:
        stale: The watch did not renew its values in between: nothing else is known then.
        seconds: Training time of the stretch.
        steps: Optimizer steps in it.
        phase_ratios: By phase, those that occurred.
        exposed_ratio: Waiting for collectives.
        comm_ratio: Collectives under way, hidden ones included.
        cause_ratios: Of waiting for compared collectives, by cause.
        coverage: Collectives recorded over those issued, the lower of both ends.
        step_wire_bytes: Bytes that this rank sent in a step.
        step_calls: Collectives in a step.
        link_bandwidth: Bytes a second on the group that sends most.
        link_latency: Seconds of the least collective there.
        on_cpu: Whether there is no device but the CPU; None if no device is known.
        device_utilization: Busy share of the device that trains, of wall time.
        headroom_ratio: Of the memory limit, on the device that has least left.
        device_headroom_ratio: Likewise of the device that trains.
        oom_risk: The highest of any device.
        straggler_score: Of this rank's slowest phase.
        offload_ratio: In code that offloads.
        tokens_per_sample: Mean over the stretch.
        world_size: Ranks of the job.
    """

    stale: bool = False
    seconds: float | None = None
    steps: float | None = None
    phase_ratios: Mapping[str, float] = field(default_factory=dict)
    exposed_ratio: float | None = None
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
    """Return what happened between two snapshots of one rank.

    Exposed communication is told every few seconds only, so a stretch should have some 20 s.
    """
    stretch = _Stretch(before=before, after=after)
    renewed = [one.value(overhead.WATCH_LAST_UPDATE_TIMESTAMP) for one in (before, after)]
    if None in renewed or renewed[0] == renewed[1]:
        return MetricsDelta(stale=True)
    phases = {phase: stretch.grown(training.PHASE_SECONDS, phase) for phase in PHASES}
    counted = known_values({phase: phases[phase] for phase in PHASES if phase not in NOT_TRAINING})
    seconds = sum(counted.values())
    reading = MetricsDelta(
        seconds=seconds or None,
        steps=stretch.grown(training.STEPS),
        phase_ratios=known_values(
            {phase: _ratio(each, seconds) for phase, each in counted.items()}
        ),
        offload_ratio=_ratio(stretch.grown_in_all(memory.OFFLOAD_SECONDS), seconds),
        tokens_per_sample=_ratio(stretch.grown(training.TOKENS), stretch.grown(training.SAMPLES)),
        world_size=_world_size(after),
    )
    return _with_device(_with_communication(reading, stretch), stretch)


def _with_communication(reading: MetricsDelta, stretch: _Stretch) -> MetricsDelta:
    exposed = stretch.grown_in_all(communication.COMM_EXPOSED_SECONDS)
    comm = stretch.grown_in_all(communication.COMM_SECONDS)
    if exposed == 0 and comm:
        exposed = None  # no exchange fell into the stretch, or their thread is dead
    causes = {
        cause: None if exposed is None else stretch.grown(communication.COMM_CAUSE_SECONDS, cause)
        for cause in CAUSE.values
    }
    wire_bytes = stretch.grown_in_all(communication.COLLECTIVE_WIRE_BYTES)
    calls = stretch.grown_in_all(communication.COLLECTIVE_CALLS)
    group = stretch.busiest_group()
    return replace(
        reading,
        exposed_ratio=_ratio(exposed, reading.seconds),
        comm_ratio=_ratio(comm, reading.seconds),
        cause_ratios=known_values(
            {name: _ratio(each, reading.seconds) for name, each in causes.items()}
        ),
        coverage=stretch.lower(communication.COMM_COVERAGE_RATIO),
        step_wire_bytes=_ratio(wire_bytes, reading.steps),
        step_calls=_ratio(calls, reading.steps),
        link_bandwidth=stretch.after.value(communication.COMM_LINK_BANDWIDTH, group),
        link_latency=stretch.after.value(communication.COMM_LINK_LATENCY, group),
    )


def _with_device(reading: MetricsDelta, stretch: _Stretch) -> MetricsDelta:
    after = stretch.after
    named = sorted(after.values.get(devices.DEVICE_UTILIZATION, {}))
    names = [label[0] for label in named]
    # A rank that has a GPU shows its CPU too.
    device = next((name for name in names if name != CPU), CPU if CPU in names else None)
    headrooms = _headroom_ratios(after)
    scores = [after.value(communication.STRAGGLER_SCORE, phase) for phase in COMPARED_PHASES]
    risks = after.values.get(memory.OOM_RISK, {})
    return replace(
        reading,
        on_cpu=None if device is None else device == CPU,
        device_utilization=stretch.mean(devices.DEVICE_UTILIZATION, device or ""),
        headroom_ratio=min(headrooms.values(), default=None),
        device_headroom_ratio=headrooms.get(device or ""),
        oom_risk=max(risks.values(), default=None),
        straggler_score=max((each for each in scores if each is not None), default=None),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Two snapshots of one rank, the earlier first."""

    before: Snapshot
    after: Snapshot

    def grown(self, spec: MetricSpec, *labels: str) -> float | None:
        """Return by how much a counter grew; None if it is not there or began anew."""
        end = self.after.value(spec, *labels)
        grown = -1.0 if end is None else end - (self.before.value(spec, *labels) or 0.0)
        return grown if grown >= 0 else None

    def grown_in_all(self, spec: MetricSpec) -> float | None:
        """Return by how much a counter grew over all its series."""
        parts = [self.grown(spec, *labels) for labels in self.after.values.get(spec, {})]
        known = [part for part in parts if part is not None]
        return sum(known) if known else None

    def busiest_group(self) -> str:
        """Return the group that sent most; nothing where none did."""
        sent: dict[str, float] = {}
        spec = communication.COLLECTIVE_WIRE_BYTES
        for op, group in self.after.values.get(spec, {}):
            sent[group] = sent.get(group, 0.0) + (self.grown(spec, op, group) or 0.0)
        return max(sent, key=lambda group: sent[group], default="")

    def lower(self, spec: MetricSpec) -> float | None:
        """Return a gauge's lower value of both ends; None if it has none at the later end."""
        return min(self._both(spec), default=None)

    def mean(self, spec: MetricSpec, *labels: str) -> float | None:
        """Return the mean of a gauge over both ends; None if it has none at the later end."""
        both = self._both(spec, *labels)
        return fmean(both) if both else None

    def _both(self, spec: MetricSpec, *labels: str) -> list[float]:
        end, start = self.after.value(spec, *labels), self.before.value(spec, *labels)
        return [] if end is None else [end] if start is None else [start, end]


def _headroom_ratios(snapshot: Snapshot) -> dict[str, float]:
    """Return by device the share of its limit that the next peak leaves free."""
    ratios = {}
    for (device,), free in snapshot.values.get(memory.MEMORY_HEADROOM, {}).items():
        limit = snapshot.value(memory.MEMORY_BYTES, device, "limit")
        if limit:
            ratios[device] = free / limit
    return ratios


def _world_size(snapshot: Snapshot) -> int | None:
    facts = next(iter(snapshot.values.get(training.RUN_INFO, {})), None)
    text = facts[_WORLD_SIZE] if facts else ""
    return int(text) if text.isdigit() else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def known_values(values: Mapping[str, float | None]) -> dict[str, float]:
    """Return the values that are not None."""
    return {name: value for name, value in values.items() if value is not None}
