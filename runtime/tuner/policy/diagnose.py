"""What holds a job back, from one rank's reading. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ....metrics import thresholds as start
from ....metrics.catalog.labels import CAUSE
from .metrics_delta import MetricsDelta, known_values
from .types import Symptom

LEAST_CAUSE_RATIO = 0.02  # of training time; a smaller cause is not worth a trial
_WELL_AWAY = 0.75  # octaves; half of one is where rounding changes
_COMPUTE = ("forward", "backward", "optimizer")
MEMORY_PRESSURE, MEMORY_IDLE = "memory_pressure", "memory_idle"
COMM_SYMPTOMS = tuple(f"comm_{cause}" for cause in CAUSE.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """From which value on something is a problem; ratios as in a Reading.

    Attributes:
        comm_ratio_high: Of waiting for collectives, all causes together.
        device_utilization_low: Below it the device waits for something else.
        data_ratio_high: Of loading data.
        host_ratio_high: Of time that neither device, nor link, nor data account for.
        oom_risk_high: Probability of running out of memory.
        headroom_low: Share of the limit below which memory is short.
        headroom_idle: Share of the limit above which memory could buy speed.
        straggler_score_high: Of a step that this rank is slower than the median one.
        imbalance_ratio_high: Of waiting for later ranks.
        coverage_low: Below it what is known of communication is no evidence.
    """

    comm_ratio_high: float = start.COMM_RATIO_HIGH
    device_utilization_low: float = start.DEVICE_UTILIZATION_LOW
    data_ratio_high: float = start.DATA_RATIO_HIGH
    host_ratio_high: float = start.HOST_RATIO_HIGH
    oom_risk_high: float = start.OOM_RISK_HIGH
    headroom_low: float = start.MEMORY_HEADROOM_LOW
    headroom_idle: float = start.MEMORY_HEADROOM_IDLE
    straggler_score_high: float = start.STRAGGLER_SCORE_HIGH
    imbalance_ratio_high: float = start.IMBALANCE_RATIO_HIGH
    coverage_low: float = start.COMM_COVERAGE_LOW


DEFAULT_THRESHOLDS = Thresholds()


def diagnose(
    reading: MetricsDelta, thresholds: Thresholds = DEFAULT_THRESHOLDS
) -> tuple[Symptom, ...]:
    """Return what holds the job back, first what may end it, then by share of the time.

    What the metrics do not tell is no symptom; a stale reading has none at all.
    """
    found = [
        *_memory(reading, thresholds),
        *_communication(reading, thresholds),
        *_device(reading, thresholds),
        *_host(reading, thresholds),
        *_data(reading, thresholds),
        *_straggler(reading, thresholds),
    ]
    return tuple(sorted(found, key=_rank))


def exposed_ratio(
    reading: MetricsDelta, thresholds: Thresholds = DEFAULT_THRESHOLDS
) -> float | None:
    """Return the share of waiting for collectives; None where that is not to be believed."""
    if reading.world_size == 1:
        return 0.0
    if reading.coverage is None or reading.coverage < thresholds.coverage_low:
        return None
    return reading.exposed_ratio


def context_of(reading: MetricsDelta, near: MetricsDelta | None = None) -> str:
    """Name the surroundings in which a verdict holds, coarsely enough to come back to.

    Figures are rounded to powers of two.

    Args:
        reading: Of the surroundings.
        near: An earlier one, whose figures hold until the new ones are well away from them, so that
            the name does not go to and fro.
    """
    before = near or reading
    link = _octave(reading.link_bandwidth, before.link_bandwidth)
    length = _octave(reading.tokens_per_sample, before.tokens_per_sample)
    ranks = reading.world_size or "?"
    return f"link 2^{link} B/s, samples of 2^{length} tokens, {ranks} ranks"


def contexts_beside(context: str) -> Sequence[str]:
    """Return the names of surroundings that are the same but for a link half or twice as fast."""
    known = re.match(r"(link 2\^)(-?\d+)(.*)", context)
    if known is None:
        return ()
    head, octave, tail = known.groups()
    return [f"{head}{int(octave) + step}{tail}" for step in (-1, 1)]


def _octave(value: float | None, near: float | None) -> str:
    if not value or value < 0:
        return "?"
    if near and near > 0 and abs(math.log2(value) - round(math.log2(near))) < _WELL_AWAY:
        return str(round(math.log2(near)))
    return str(round(math.log2(value)))


def _rank(symptom: Symptom) -> tuple[int, float]:
    place = {MEMORY_PRESSURE: 0, MEMORY_IDLE: 2}.get(symptom.name, 1)
    return place, -symptom.ratio


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
    if exposed is None or exposed <= thresholds.comm_ratio_high:
        return
    for cause, ratio in reading.cause_ratios.items():
        if ratio >= LEAST_CAUSE_RATIO:
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
    if busy is not None and busy < thresholds.device_utilization_low:
        # Of a CPU it is the training thread's computing, and no such metric.
        name = "computing_ratio" if reading.on_cpu else "device_utilization_ratio"
        evidence = {name: busy}
        yield Symptom(name="device_idle", ratio=1 - busy, evidence=evidence)


def _busy_ratio(reading: MetricsDelta, thresholds: Thresholds) -> float | None:
    """Return the busy share of the device that trains.

    How many of its cores a process keeps busy says little on a CPU: that is as many as its
    threads. There it is the share of time in which the training thread computes.
    """
    if not reading.on_cpu:
        return reading.device_utilization
    exposed = exposed_ratio(reading, thresholds)
    if exposed is None or "backward" not in reading.phase_ratios:
        return None
    computing = sum(reading.phase_ratios.get(phase, 0.0) for phase in _COMPUTE)
    return computing  # waiting for collectives in it has symptoms of its own


def _host(reading: MetricsDelta, thresholds: Thresholds) -> Iterator[Symptom]:
    """Tell of a job that waits for Python; on a CPU only what is outside all phases shows it."""
    exposed = exposed_ratio(reading, thresholds)
    if exposed is None or exposed > thresholds.comm_ratio_high:
        return
    data = reading.phase_ratios.get("data", 0.0)
    ratio = reading.phase_ratios.get("other", 0.0)
    busy = reading.device_utilization
    if not reading.on_cpu and busy is not None and busy < thresholds.device_utilization_low:
        ratio = max(ratio, 1 - busy - exposed - data)
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
    ratio = reading.phase_ratios.get("data")
    if ratio is not None and ratio > thresholds.data_ratio_high:
        yield Symptom(name="data_bound", ratio=ratio, evidence={"data_ratio": ratio})


def _straggler(reading: MetricsDelta, thresholds: Thresholds) -> Iterator[Symptom]:
    """Tell of a slow rank: this one by its score, another by how long this one waits for it."""
    score = reading.straggler_score
    waits = None
    if exposed_ratio(reading, thresholds) is not None:
        waits = reading.cause_ratios.get("imbalance")
    slow = score is not None and score >= thresholds.straggler_score_high
    if slow or (waits is not None and waits >= thresholds.imbalance_ratio_high):
        evidence = known_values({"straggler_score_ratio": score, "imbalance_ratio": waits})
        yield Symptom(name="straggler", ratio=max(score or 0.0, waits or 0.0), evidence=evidence)
