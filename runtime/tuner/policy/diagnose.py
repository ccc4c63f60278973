"""Diagnoses what slows a job down or endangers it, from the metrics of one rank. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ....metrics import thresholds as defaults
from ....metrics.catalog.labels import CAUSE
from ....metrics.settings import Settings
from .metrics_delta import MetricsDelta, known_values
from .policy_types import Symptom

MIN_CAUSE_RATIO = 0.02  # share of training time; a smaller cause is not worth a trial
# A figure of a context must change by this many powers of two before its rounded value changes.
# Without hysteresis, the rounded value would change at 0.5.
_CONTEXT_HYSTERESIS = 0.75
_COMPUTE = ("forward", "backward", "optimizer")
# Names of symptoms, as in SYMPTOMS of `metrics/catalog/tuner.py`.
MEMORY_PRESSURE = "memory_pressure"
MEMORY_IDLE = "memory_idle"
COMM_SYMPTOMS = tuple(f"comm_{cause}" for cause in CAUSE.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Values from which on a metric is a symptom; ratios as in a MetricsDelta.

    Attributes:
        max_exposed_comm_ratio: Waiting for collectives, all causes together.
        min_device_utilization_ratio: Below it the device is idle.
        data_ratio_high: Loading data.
        host_ratio_high: Time that neither device, nor link, nor data account for.
        oom_risk_high: Probability of running out of memory.
        headroom_low: Share of the limit below which memory is short.
        headroom_idle: Share of the limit above which memory can be traded for speed.
        straggler_score_high: Share of a step that this rank is slower than the median rank.
        imbalance_ratio_high: Waiting for slower ranks.
        coverage_low: Below it the figures of communication are not used.
    """

    max_exposed_comm_ratio: float = defaults.EXPOSED_COMM_RATIO_HIGH
    min_device_utilization_ratio: float = defaults.DEVICE_UTILIZATION_LOW
    data_ratio_high: float = defaults.DATA_RATIO_HIGH
    host_ratio_high: float = defaults.HOST_RATIO_HIGH
    oom_risk_high: float = defaults.OOM_RISK_HIGH
    headroom_low: float = defaults.MEMORY_HEADROOM_LOW
    headroom_idle: float = defaults.MEMORY_HEADROOM_IDLE
    straggler_score_high: float = defaults.STRAGGLER_SCORE_HIGH
    imbalance_ratio_high: float = defaults.IMBALANCE_RATIO_HIGH
    coverage_low: float = defaults.COMM_COVERAGE_LOW

    @classmethod
    def of_settings(cls, settings: Settings) -> Thresholds:
        """Return the thresholds as the user set them."""
        return cls(
            max_exposed_comm_ratio=settings.tuner.max_exposed_comm_ratio,
            min_device_utilization_ratio=settings.tuner.min_device_utilization_ratio,
        )


DEFAULT_THRESHOLDS = Thresholds()


def diagnose(
    reading: MetricsDelta, thresholds: Thresholds = DEFAULT_THRESHOLDS
) -> tuple[Symptom, ...]:
    """Return the symptoms: memory pressure first, then by share of time, idle memory last.

    A missing metric does not give a symptom. A stale reading does not give any symptoms.
    """
    symptoms = [
        *_memory(reading, thresholds),
        *_communication(reading, thresholds),
        *_device(reading, thresholds),
        *_host(reading, thresholds),
        *_data(reading, thresholds),
        *_straggler(reading, thresholds),
    ]
    return tuple(sorted(symptoms, key=_rank))


def exposed_ratio(
    reading: MetricsDelta, thresholds: Thresholds = DEFAULT_THRESHOLDS
) -> float | None:
    """Return the share of waiting for collectives; None if it is unknown or unreliable.

    The share leaves out the transfer of zerowatch's own collectives, like
    `MetricsDelta.exposed_ratio`.
    """
    if reading.world_size == 1:
        return 0.0
    if reading.coverage is None or reading.coverage < thresholds.coverage_low:
        return None
    return reading.exposed_ratio


def context_of(reading: MetricsDelta, near: MetricsDelta | None = None) -> str:
    """Name the context in which a verdict holds, coarsely enough to recur.

    Figures are rounded to powers of two.

    Args:
        reading: Metrics of the context.
        near: An earlier reading. The figures in the name are kept until new figures differ clearly,
            so that the name does not alternate.
    """
    before = near or reading
    link = _octave(reading.link_bandwidth, before.link_bandwidth)
    length = _octave(reading.tokens_per_sample, before.tokens_per_sample)
    ranks = reading.world_size or "?"
    return f"link 2^{link} B/s, samples of 2^{length} tokens, {ranks} ranks"


def adjacent_contexts(context: str) -> Sequence[str]:
    """Return the names of the contexts whose link is half or twice as fast, all else equal."""
    known = re.match(r"(link 2\^)(-?\d+)(.*)", context)
    if known is None:
        return ()
    head, octave, tail = known.groups()
    return [f"{head}{int(octave) + step}{tail}" for step in (-1, 1)]


def _octave(value: float | None, near: float | None) -> str:
    if not value or value < 0:
        return "?"
    if near and near > 0 and abs(math.log2(value) - round(math.log2(near))) < _CONTEXT_HYSTERESIS:
        return str(round(math.log2(near)))
    return str(round(math.log2(value)))


def _rank(symptom: Symptom) -> tuple[int, float]:
    group = {MEMORY_PRESSURE: 0, MEMORY_IDLE: 2}.get(symptom.name, 1)
    return group, -symptom.ratio


def _memory(reading: MetricsDelta, thresholds: Thresholds) -> Iterator[Symptom]:
    evidence = known_values(
        {"oom_risk_ratio": reading.oom_risk, "headroom_ratio": reading.headroom_ratio}
    )
    risk = reading.oom_risk
    low = reading.headroom_ratio is not None and reading.headroom_ratio < thresholds.headroom_low
    if low or (risk is not None and risk > thresholds.oom_risk_high):
        yield Symptom(name=MEMORY_PRESSURE, ratio=risk or 0.0, evidence=evidence)
        return
    free = reading.device_headroom_ratio
    if free is not None and free > thresholds.headroom_idle:
        evidence = known_values({"oom_risk_ratio": risk, "headroom_ratio": free})
        yield Symptom(name=MEMORY_IDLE, ratio=free, evidence=evidence)


def _communication(reading: MetricsDelta, thresholds: Thresholds) -> Iterator[Symptom]:
    exposed = exposed_ratio(reading, thresholds)
    if exposed is None or exposed <= thresholds.max_exposed_comm_ratio:
        return
    for cause, ratio in reading.cause_ratios.items():
        if ratio >= MIN_CAUSE_RATIO:
            evidence = known_values(
                {
                    "comm_exposed_ratio": exposed,
                    "cause_ratio": ratio,
                    "coverage_ratio": reading.coverage,
                    "link_bandwidth_bytes_per_second": reading.link_bandwidth,
                    "link_latency_seconds": reading.link_latency,
                    "step_wire_bytes": reading.step_wire_bytes,
                    "step_calls": reading.step_calls,
                }
            )
            yield Symptom(name=f"comm_{cause}", ratio=ratio, evidence=evidence)


def _device(reading: MetricsDelta, thresholds: Thresholds) -> Iterator[Symptom]:
    busy = _busy_ratio(reading, thresholds)
    if busy is not None and busy < thresholds.min_device_utilization_ratio:
        name = "computing_ratio" if reading.on_cpu else "device_utilization_ratio"
        evidence = {name: busy}
        yield Symptom(name="device_idle", ratio=1 - busy, evidence=evidence)


def _busy_ratio(reading: MetricsDelta, thresholds: Thresholds) -> float | None:
    """Return the busy share of the training device.

    On a CPU, this is the share of time in which the training thread computes or waits for
    collectives. Waiting for collectives has its own symptoms. The number of busy cores is not used,
    because it depends on the number of threads.
    """
    if not reading.on_cpu:
        return reading.device_utilization
    exposed = exposed_ratio(reading, thresholds)
    if exposed is None or "backward" not in reading.phase_ratios:
        return None
    computing = sum(reading.phase_ratios.get(phase, 0.0) for phase in _COMPUTE)
    return computing + reading.own_exposed_ratios.get("other", 0.0)


def _host(reading: MetricsDelta, thresholds: Thresholds) -> Iterator[Symptom]:
    """Find a job that waits for Python. On a CPU, only time outside all phases shows this wait.

    A device does not wait for the host for longer than it is idle.
    The ranks of a TrainingRun also wait for each other outside all phases. This wait is not counted
    as time of Python.
    """
    exposed = exposed_ratio(reading, thresholds)
    if exposed is None or exposed > thresholds.max_exposed_comm_ratio:
        return
    data = reading.phase_ratios.get("data", 0.0)
    waits = reading.own_exposed_ratios.get("other", 0.0)
    ratio = max(0.0, reading.phase_ratios.get("other", 0.0) - waits)
    ratio, busy = min(ratio, _idle_ratio(reading)), reading.device_utilization
    if not reading.on_cpu and busy is not None and busy < thresholds.min_device_utilization_ratio:
        ratio = max(ratio, 1 - busy - exposed - reading.own_transfer_ratio - data)
    if ratio > thresholds.host_ratio_high:
        evidence = known_values(
            {
                "comm_exposed_ratio": exposed,
                "data_ratio": data,
                "other_ratio": reading.phase_ratios.get("other"),
                "device_utilization_ratio": busy,
            }
        )
        yield Symptom(name="host_bound", ratio=ratio, evidence=evidence)


def _data(reading: MetricsDelta, thresholds: Thresholds) -> Iterator[Symptom]:
    """Find a job that waits for data. A device does not wait for longer than it is idle."""
    data = reading.phase_ratios.get("data", 0.0)
    ratio = min(data, _idle_ratio(reading))
    if ratio > thresholds.data_ratio_high:
        yield Symptom(name="data_bound", ratio=ratio, evidence={"data_ratio": data})


def _idle_ratio(reading: MetricsDelta) -> float:
    """Return the largest share of time for which the device can have waited for the host."""
    if reading.on_cpu or reading.device_utilization is None:
        return 1.0
    return 1.0 - reading.device_utilization


def _straggler(reading: MetricsDelta, thresholds: Thresholds) -> Iterator[Symptom]:
    """Find a slow rank.

    If this rank is slow, its score shows it. If another rank is slow, this rank waits for it.
    """
    score = reading.straggler_score
    waits = None
    if exposed_ratio(reading, thresholds) is not None:
        waits = reading.cause_ratios.get("imbalance")
    slow = score is not None and score >= thresholds.straggler_score_high
    if slow or (waits is not None and waits >= thresholds.imbalance_ratio_high):
        evidence = known_values({"straggler_score_ratio": score, "imbalance_ratio": waits})
        yield Symptom(name="straggler", ratio=max(score or 0.0, waits or 0.0), evidence=evidence)
