"""Alerts on training, and on devices that are idle."""

from __future__ import annotations

from rules.history import (
    GONE,
    Series,
    Stretch,
    answers,
    counter,
    gauge,
    of_both,
    of_rank,
    training,
    training_rank,
)
from rules.promtool import Case, says

LABELS = {"component": "training", "job": "zerowatch", "run": "night-7"}
STALLED = {"alertname": "ZerowatchTrainingStalled", "severity": "critical", **LABELS}
DOWN = {
    "alertname": "ZerowatchRankDown",
    "severity": "critical",
    "instance": "10.0.0.1:9464",
    "node": "node-1",
    "rank": "1",
    **LABELS,
}
NOT_FINITE = {"alertname": "ZerowatchLossNotFinite", "severity": "critical", **LABELS}
COLLAPSE = {"alertname": "ZerowatchLossScaleCollapse", "severity": "critical", **LABELS}
DATA_BOUND = {"alertname": "ZerowatchDataBound", "severity": "warning", "phase": "data", **LABELS}
IDLE = {
    "alertname": "ZerowatchLowDeviceUtilization",
    "severity": "warning",
    **LABELS,
    "component": "devices",
}
ELSEWHERE = {"instance": "10.0.0.9:9464", "node": "node-9"}
ACTIVITY = "zerowatch_last_activity_timestamp_seconds"


def steps(*stretches: Stretch) -> Series:
    """A run whose steps and activity come and go together."""
    minutes = sum(stretch[0] for stretch in stretches)
    pace = counter(*stretches)
    return training(minutes) | of_both("zerowatch_steps_total", pace) | of_both(ACTIVITY, pace)


def loading(*stretches: Stretch) -> Series:
    """Loading takes so many seconds beside each 0.98 of the rest."""
    minutes = sum(stretch[0] for stretch in stretches)
    seconds = counter(*stretches)
    return training(minutes) | of_both("zerowatch_phase_seconds_total", seconds, phase="data")


def loss_scale(*stretches: Stretch) -> Series:
    minutes = sum(stretch[0] for stretch in stretches)
    return training(minutes) | of_both("zerowatch_loss_scale", gauge(*stretches))


def busy(device: str, *stretches: Stretch) -> Series:
    minutes = sum(stretch[0] for stretch in stretches)
    ratio = gauge(*stretches)
    return training(minutes) | of_both("zerowatch_device_utilization_ratio", ratio, device=device)


CASES = (
    Case(
        title="A run that takes no step and shows no sign of activity stands still",
        series=steps((5, 1), (15, 0), (5, 1)),
        alert=STALLED,
        fires_at="15m",
        recovers_at="20m15s",
        annotations=says(
            "ZerowatchTrainingStalled",
            dashboard="zerowatch-overview",
            summary="Training night-7 has stalled",
            description="Nothing has moved for ten minutes, on any rank; 294 steps were done. Read "
            "hang-rank-*.txt in the run folder: the first line says who is missing where.",
        ),
    ),
    Case(
        title="An evaluation of a quarter of an hour takes no steps, but is active",
        series=training(25) | of_both("zerowatch_steps_total", counter((5, 1), (15, 0), (5, 1))),
        until="25m",
    ),
    Case(
        title="A step a minute is slow, and not still",
        series=steps(*((0.9, 0), (0.1, 1)) * 20),
        until="20m",
    ),
    Case(
        title="A pause of nine minutes is not yet a standstill",
        series=steps((5, 1), (9, 0), (5, 1)),
        until="19m",
    ),
    Case(
        title="A rank that is killed is down, until it answers again",
        series=training_rank(0, (15, 1)) | training_rank(1, (5, 1), (5, GONE), (5, 1)),
        alert=DOWN,
        fires_at="6m15s",
        recovers_at="10m15s",
        annotations=says(
            "ZerowatchRankDown",
            dashboard="zerowatch-overview",
            summary="Rank 1 of training night-7 does not answer",
            description="It was training when it was last heard of, on node-1 (10.0.0.1:9464). See "
            "whether its process is alive, and what it wrote last; other alerts of this run are "
            "inhibited meanwhile.",
        ),
    ),
    Case(
        title="A rank that nobody brings back is told of for a quarter of an hour",
        series=training_rank(0, (25, 1)) | training_rank(1, (5, 1), (20, GONE)),
        alert=DOWN,
        fires_at="6m15s",
        recovers_at="20m",
    ),
    Case(
        title="A rank that is restarted within a minute is not told of",
        series=training_rank(0, (10, 1)) | training_rank(1, (5, 1), (0.8, GONE), (4.2, 1)),
        until="10m",
    ),
    Case(
        title="A rank that comes back on another port is not down, though its old port is silent",
        series=training_rank(0, (15, 1))
        | training_rank(1, (5, 1), (10, GONE))
        | of_rank(1, "up", gauge((5.5, GONE), (9.5, 1)), instance="10.0.0.1:9564")
        | of_rank(
            1, "zerowatch_run_active", gauge((5.5, GONE), (9.5, 1)), instance="10.0.0.1:9564"
        ),
        until="15m",
    ),
    Case(
        title="A rank that was killed, came back on another host and ended there is not down",
        series=training_rank(0, (10, 1), (0.25, 0), (14.75, GONE))
        | of_rank(1, "zerowatch_run_active", gauge((5, 1), (20, GONE)))
        | of_rank(1, "up", gauge((5.5, 1), (19.5, GONE)))  # it is no longer a target
        | of_rank(1, "zerowatch_run_active", gauge((5.5, GONE), (4.5, 1), (0.25, 0)), **ELSEWHERE)
        | of_rank(1, "up", gauge((5.5, GONE), (4.75, 1), (14.75, 0)), **ELSEWHERE),
        until="25m",
    ),
    Case(
        title="A run that has ended as it should raises nothing, though its ranks answer no more",
        series=training_rank(0, (10, 1), (0.25, 0), (19.75, GONE))
        | training_rank(1, (10, 1), (0.25, 0), (19.75, GONE)),
        until="30m",
    ),
    Case(
        title="A target that never was a rank is none of our business",
        series=training(10) | answers((10, GONE), rank=7),
        until="10m",
    ),
    Case(
        title="A loss that is not finite is told of at once",
        series=training(17)
        | of_both("zerowatch_nonfinite_losses_total", counter((5, 0), (1, 1), (11, 0))),
        alert=NOT_FINITE,
        fires_at="5m15s",
        recovers_at="16m",
    ),
    Case(
        title="A loss scale that falls from 65536 to 16 has collapsed",
        series=loss_scale((5, 65536), (1, 1024), (1, 32), (3, 16), (6, 32)),
        alert=COLLAPSE,
        fires_at="7m",
        recovers_at="15m15s",
    ),
    Case(
        title="A loss scale that begins far too high may halve itself down to 32",
        series=loss_scale((1, 4294967296), (1, 65536), (1, 1024), (12, 32)),
        until="15m",
    ),
    Case(
        title="A loss scale that is 1 and always was is one that somebody set",
        series=loss_scale((15, 1)),
        until="15m",
    ),
    Case(
        title="Loading that takes an eighth of the time is waited for",
        series=loading((12, 0.14), (8, 0)),
        alert=DATA_BOUND,
        fires_at="10m15s",
        recovers_at="18m15s",
    ),
    Case(
        title="Loading that takes a twelfth of the time is not worth a word",
        series=loading((15, 0.085)),
        until="15m",
    ),
    Case(
        title="GPUs that are busy three fifths of the time are idle too often",
        series=busy("cuda:0", (3, 0.95), (14, 0.6), (7, 0.95)),
        alert=IDLE,
        fires_at="16m45s",
        recovers_at="23m30s",
    ),
    Case(
        title="GPUs that are busy three quarters of the time are busy enough",
        series=busy("cuda:0", (20, 0.75)),
        until="20m",
    ),
    Case(
        title="A process that uses half of its host's cores is fine",
        series=busy("cpu", (20, 0.5)),
        until="20m",
    ),
)
