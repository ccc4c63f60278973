"""Computes what the live page shows of a run at this moment, from the metrics of rank 0.

Each value is that of a metric, or a sum of series of one metric, so that the page agrees with
`/metrics`. Values about the last minute come from the steps in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...metrics.catalog import communication, devices, memory, overhead, training, tuner
from ...metrics.catalog.across_ranks import STATISTICS
from ...metrics.catalog.labels import NON_TRAINING_PHASES, PHASES
from ...metrics.catalog.memory import MEMORY_CATEGORIES
from ...metrics.catalog.spec import MetricSpec
from ...metrics.recorder import Snapshot
from .current_problems import Problem, current_problems
from .step_history import CAUSES, Point

# Age of the last progress from which training counts as stalled, like in the dashboards.
STALLED_SECONDS = 300.0
# Ranks in the table. Of more ranks, those are shown for which the others wait longest.
MAX_RANKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """What rank 0 knows about the ranks.

    Attributes:
        figures: The figures of each rank (`across_ranks.STATISTICS`); a figure may be absent.
        slow: By rank the phases in which it is slow, with its score.
        addresses: The address of each rank's metrics.
        nodes: The node of each rank.
    """

    figures: Mapping[int, Mapping[str, float]]
    slow: Mapping[int, Mapping[str, float]]
    addresses: Mapping[int, str]
    nodes: Mapping[int, str]


def run_state(
    snapshot: Snapshot,
    *,
    recent: Point | None,
    ranks: Ranks,
    thresholds: Mapping[str, float],
    run_id: str | None,
    now: float,
    nonfinite_at: float | None = None,
) -> dict[str, object]:
    """Return the state of the run, as values that can be converted to JSON. Unknown is None.

    Args:
        snapshot: The metrics of rank 0.
        recent: The steps of the last minute.
        ranks: What rank 0 knows about the ranks.
        thresholds: Thresholds of alerts that the settings replace.
        run_id: The id of the run.
        now: Unix time.
        nonfinite_at: Unix time of the last loss that was not finite, if known.
    """
    problems = current_problems(
        snapshot,
        recent=recent,
        slow=ranks.slow,
        thresholds=thresholds,
        now=now,
        nonfinite_at=nonfinite_at,
    )
    return {
        "now": now,
        "run": _run(snapshot, run_id),
        "status": _status(snapshot, now),
        "problems": [_problem(problem) for problem in problems],
        "training": _training(snapshot, recent),
        "phases": _phases(snapshot, recent),
        "communication": _communication(snapshot, recent),
        "memory": _memory(snapshot),
        "devices": _devices(snapshot),
        "ranks": _ranks(snapshot, ranks),
        "tuner": _tuner(snapshot),
        "monitoring": _monitoring(snapshot),
    }


def _run(snapshot: Snapshot, run_id: str | None) -> dict[str, object]:
    labels = next(iter(snapshot.values.get(training.RUN_INFO, {})), ())
    info = dict(zip(training.RUN_INFO.label_names, labels, strict=False))
    return {
        **info,
        "run_id": run_id,
        "attempt": snapshot.value(training.RUN_ATTEMPT),
        "started_at": snapshot.value(training.RUN_START_TIMESTAMP),
        "last_step_at": snapshot.value(training.LAST_STEP_TIMESTAMP),
        "last_activity_at": snapshot.value(training.LAST_ACTIVITY_TIMESTAMP),
    }


def _status(snapshot: Snapshot, now: float) -> str:
    """Return one word for the state of the run, like the dashboards."""
    reasons = [reason for (reason,) in snapshot.values.get(training.RUN_END_INFO, {})]
    if reasons:
        return reasons[0]
    if snapshot.value(training.RUN_ACTIVE) == 0:
        return "ended"
    if snapshot.value(communication.HANG_ACTIVE):
        return "hanging"
    last = snapshot.value(training.LAST_ACTIVITY_TIMESTAMP)
    if last is not None and now - last > STALLED_SECONDS:
        return "stalled"
    return "training" if snapshot.total(training.STEPS) else "starting"


def _problem(problem: Problem) -> dict[str, object]:
    return {"alert": problem.alert, "severity": problem.severity, "text": problem.text}


def _training(snapshot: Snapshot, recent: Point | None) -> dict[str, object]:
    quantiles = snapshot.values.get(training.STEP_DURATION_QUANTILE, {})
    seconds = None if recent is None else recent.seconds
    return {
        "step": None if recent is None else recent.step,
        "steps": snapshot.value(training.STEPS),
        "step_seconds": {quantile: value for (quantile,), value in quantiles.items()},
        "steps_per_second": ratio_or_none(None if recent is None else recent.steps, seconds),
        "samples_per_second": ratio_or_none((recent and recent.samples) or None, seconds),
        "tokens_per_second": ratio_or_none((recent and recent.tokens) or None, seconds),
        "loss": snapshot.value(training.LOSS),
        "gradient_norm": snapshot.value(training.GRADIENT_NORM),
        "learning_rate": snapshot.value(training.LEARNING_RATE),
        "loss_scale": snapshot.value(training.LOSS_SCALE),
        "mfu": snapshot.value(training.MFU),
        "nonfinite_losses": snapshot.value(training.NONFINITE_LOSSES),
        "skipped": snapshot.value(training.SKIPPED_STEPS),
        "checkpoints": snapshot.value(training.CHECKPOINTS, "saved"),
        "last_checkpoint_at": snapshot.value(training.LAST_CHECKPOINT_TIMESTAMP),
    }


def _phases(snapshot: Snapshot, recent: Point | None) -> dict[str, object]:
    seconds = {
        phase: spent
        for phase in PHASES
        if (spent := snapshot.value(training.PHASE_SECONDS, phase) or 0.0)
    }
    last_minute = dict(zip(PHASES, recent.phase_seconds, strict=True)) if recent else {}
    return {
        "seconds": seconds,
        "recent_seconds": {phase: last_minute.get(phase, 0.0) for phase in seconds},
    }


def _communication(snapshot: Snapshot, recent: Point | None) -> dict[str, object]:
    exposed_ratio = recent_causes = None
    if recent is not None:
        exposed_ratio = ratio_or_none(recent.exposed_seconds, recent.timed_seconds)
        recent_causes = dict(zip(CAUSES, recent.cause_seconds, strict=True))
    training_seconds = sum(
        spent
        for (phase,), spent in snapshot.values.get(training.PHASE_SECONDS, {}).items()
        if phase not in NON_TRAINING_PHASES
    )
    exposed: float | None = snapshot.total(communication.COMM_EXPOSED_SECONDS)
    coverage = snapshot.value(communication.COMM_COVERAGE_RATIO)
    has_untimed_calls = snapshot.value(overhead.DROPPED_RECORDS, "timing") or (
        coverage is not None and coverage < 1
    )
    if not exposed and has_untimed_calls:
        exposed = None  # no call has a duration, such as those of DDP
    return {
        "exposed_ratio": exposed_ratio,
        "run_exposed_ratio": ratio_or_none(exposed, training_seconds),
        "exposed_seconds": exposed,
        "seconds": snapshot.total(communication.COMM_UNION_SECONDS),
        "causes": {
            cause: snapshot.value(communication.COMM_CAUSE_SECONDS, cause) or 0.0
            for cause in CAUSES
        },
        "recent_causes": recent_causes,
        "wire_bytes": snapshot.total(communication.COLLECTIVE_WIRE_BYTES),
        "volume_ratio": snapshot.value(communication.COMM_VOLUME_RATIO),
        "coverage": coverage,
        "link_bandwidth": _by_label(snapshot, communication.COMM_LINK_BANDWIDTH),
    }


def _memory(snapshot: Snapshot) -> list[dict[str, object]]:
    in_use = snapshot.values.get(memory.MEMORY_BYTES, {})
    names = {device for device, _ in in_use} | _labels(snapshot, memory.MEMORY_LIMIT)
    return [
        {
            "device": device,
            "allocated": snapshot.value(memory.MEMORY_BYTES, device, "allocated"),
            "peak": snapshot.value(memory.MEMORY_PEAK, device, "allocated"),
            "limit": snapshot.value(memory.MEMORY_LIMIT, device),
            "predicted_peak": snapshot.value(memory.MEMORY_PREDICTED_PEAK, device),
            "risk": snapshot.value(memory.OOM_RISK, device),
            "baseline": snapshot.value(memory.MEMORY_BASELINE, device),
            "categories": {
                category: value
                for category in MEMORY_CATEGORIES
                if (value := snapshot.value(memory.MEMORY_CATEGORY_BYTES, device, category))
            },
        }
        for device in sorted(names, key=lambda name: (name == "cpu", name))
    ]


def _devices(snapshot: Snapshot) -> list[dict[str, object]]:
    names = _labels(snapshot, devices.DEVICE_UTILIZATION)
    return [
        {
            "device": device,
            "utilization": snapshot.value(devices.DEVICE_UTILIZATION, device),
            "power": snapshot.value(devices.DEVICE_POWER, device),
            "temperature": snapshot.value(devices.DEVICE_TEMPERATURE, device),
        }
        for device in sorted(names, key=lambda name: (name == "cpu", name))
    ]


def _ranks(snapshot: Snapshot, ranks: Ranks) -> dict[str, object]:
    known = sorted({*ranks.figures, *ranks.addresses})
    shown = known
    if len(known) > MAX_RANKS:
        by_wait = sorted(known, key=lambda rank: ranks.figures.get(rank, {}).get("comm_wait", 1.0))
        first = sorted(ranks.slow) + [rank for rank in by_wait if rank not in ranks.slow]
        shown = sorted(first[:MAX_RANKS])
    return {
        "world_size": snapshot.value(training.WORLD_SIZE),
        "known": len(known),
        "figures": [name for name in STATISTICS if any(name in f for f in ranks.figures.values())],
        "rows": [
            {
                "rank": rank,
                "node": ranks.nodes.get(rank),
                "address": ranks.addresses.get(rank),
                "slow": ranks.slow.get(rank, {}),
                **ranks.figures.get(rank, {}),
            }
            for rank in shown
        ],
        "own_scores": _by_label(snapshot, communication.STRAGGLER_SCORE),
    }


def _tuner(snapshot: Snapshot) -> dict[str, object]:
    states = _by_label(snapshot, tuner.TUNER_STATE)
    return {
        "state": next((state for state, is_current in states.items() if is_current), None),
        "knobs": _by_label(snapshot, tuner.TUNER_KNOB_VALUE),
        "gains": _by_label(snapshot, tuner.TUNER_GAIN),
        "gain_lower_bounds": _by_label(snapshot, tuner.TUNER_GAIN_LOWER_BOUND),
        "symptoms": {
            symptom: strength
            for symptom, strength in _by_label(snapshot, tuner.TUNER_SYMPTOM).items()
            if strength > 0
        },
        "decisions": {
            verdict: number
            for verdict, number in _by_label(snapshot, tuner.TUNER_DECISIONS).items()
            if number
        },
    }


def _monitoring(snapshot: Snapshot) -> dict[str, object]:
    return {
        "seconds": snapshot.total(overhead.WATCH_SECONDS),
        "updated_at": snapshot.value(overhead.WATCH_LAST_UPDATE_TIMESTAMP),
        "dropped": snapshot.total(overhead.DROPPED_RECORDS),
        "failures": snapshot.total(overhead.HOOK_FAILURES),
    }


def _labels(snapshot: Snapshot, spec: MetricSpec) -> set[str]:
    return {labels[0] for labels in snapshot.values.get(spec, {})}


def _by_label(snapshot: Snapshot, spec: MetricSpec) -> dict[str, float]:
    """Return the values of a metric with one label."""
    return {labels[0]: value for labels, value in snapshot.values.get(spec, {}).items()}


def ratio_or_none(part: float | None, whole: float | None) -> float | None:
    """Return a ratio; None if a part of it is unknown, or the whole is 0."""
    return part / whole if part is not None and whole else None
