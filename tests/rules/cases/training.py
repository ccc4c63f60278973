"""Test cases of the alerts on training and on idle devices."""

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
from rules.promtool import Case, annotations_of

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
    """A run whose steps and activity start and stop together."""
    minutes = sum(stretch[0] for stretch in stretches)
    pace = counter(*stretches)
    return training(minutes) | of_both("zerowatch_steps_total", pace) | of_both(ACTIVITY, pace)


def loading(*stretches: Stretch) -> Series:
    """Seconds of loading for each 0.98 seconds of the rest."""
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
        title="Fires if a run has no steps and no activity",
        series=steps((5, 1), (15, 0), (5, 1)),
        alert=STALLED,
        fires_at="15m",
        recovers_at="20m15s",
        annotations=annotations_of(
            "ZerowatchTrainingStalled",
            dashboard="zerowatch-overview",
            summary="Training night-7 has stalled",
            description="No rank has made progress for ten minutes. The run has completed 294 "
            "steps. Read hang-rank-*.txt in the run folder: the first line names the missing "
            "ranks, and where they are missing.",
        ),
    ),
    Case(
        title="Does not fire during an evaluation of 15 minutes",
        series=training(25) | of_both("zerowatch_steps_total", counter((5, 1), (15, 0), (5, 1))),
        until="25m",
    ),
    Case(
        title="Does not fire at one step a minute",
        series=steps(*((0.9, 0), (0.1, 1)) * 20),
        until="20m",
    ),
    Case(
        title="Does not fire on a pause of nine minutes",
        series=steps((5, 1), (9, 0), (5, 1)),
        until="19m",
    ),
    Case(
        title="Fires if a rank is killed and resolves when it answers again",
        series=training_rank(0, (15, 1)) | training_rank(1, (5, 1), (5, GONE), (5, 1)),
        alert=DOWN,
        fires_at="6m15s",
        recovers_at="10m15s",
        annotations=annotations_of(
            "ZerowatchRankDown",
            dashboard="zerowatch-overview",
            summary="Rank 1 of training night-7 does not answer",
            description="The rank was last seen training on node-1 (10.0.0.1:9464). Check whether "
            "its process is alive, and read the end of its log. While this alert fires, the other "
            "alerts of the run are inhibited.",
        ),
    ),
    Case(
        title="Fires for 15 minutes if a rank does not come back",
        series=training_rank(0, (25, 1)) | training_rank(1, (5, 1), (20, GONE)),
        alert=DOWN,
        fires_at="6m15s",
        recovers_at="20m",
    ),
    Case(
        title="Does not fire if a rank restarts within a minute",
        series=training_rank(0, (10, 1)) | training_rank(1, (5, 1), (0.8, GONE), (4.2, 1)),
        until="10m",
    ),
    Case(
        title="Does not fire if a rank comes back on another port",
        series=training_rank(0, (15, 1))
        | training_rank(1, (5, 1), (10, GONE))
        | of_rank(1, "up", gauge((5.5, GONE), (9.5, 1)), instance="10.0.0.1:9564")
        | of_rank(
            1, "zerowatch_run_active", gauge((5.5, GONE), (9.5, 1)), instance="10.0.0.1:9564"
        ),
        until="15m",
    ),
    Case(
        title="Does not fire if a killed rank came back on another host and ended there",
        series=training_rank(0, (10, 1), (0.25, 0), (14.75, GONE))
        | of_rank(1, "zerowatch_run_active", gauge((5, 1), (20, GONE)))
        | of_rank(1, "up", gauge((5.5, 1), (19.5, GONE)))  # it is no longer a target
        | of_rank(1, "zerowatch_run_active", gauge((5.5, GONE), (4.5, 1), (0.25, 0)), **ELSEWHERE)
        | of_rank(1, "up", gauge((5.5, GONE), (4.75, 1), (14.75, 0)), **ELSEWHERE),
        until="25m",
    ),
    Case(
        title="Does not fire after a run has ended normally",
        series=training_rank(0, (10, 1), (0.25, 0), (19.75, GONE))
        | training_rank(1, (10, 1), (0.25, 0), (19.75, GONE)),
        until="30m",
    ),
    Case(
        title="Does not fire on a target that never was a rank",
        series=training(10) | answers((10, GONE), rank=7),
        until="10m",
    ),
    Case(
        title="Fires at once on a loss that is not finite",
        series=training(17)
        | of_both("zerowatch_nonfinite_losses_total", counter((5, 0), (1, 1), (11, 0))),
        alert=NOT_FINITE,
        fires_at="5m15s",
        recovers_at="16m",
    ),
    Case(
        title="Fires if the loss scale falls from 65536 to 16",
        series=loss_scale((5, 65536), (1, 1024), (1, 32), (3, 16), (6, 32)),
        alert=COLLAPSE,
        fires_at="7m",
        recovers_at="15m15s",
    ),
    Case(
        title="Does not fire if a high initial loss scale falls to 32",
        series=loss_scale((1, 4294967296), (1, 65536), (1, 1024), (12, 32)),
        until="15m",
    ),
    Case(
        title="Does not fire on a loss scale that is always 1",
        series=loss_scale((15, 1)),
        until="15m",
    ),
    Case(
        title="Fires if loading takes 12.5 % of the time",
        series=loading((12, 0.14), (8, 0)),
        alert=DATA_BOUND,
        fires_at="10m15s",
        recovers_at="18m15s",
    ),
    Case(
        title="Does not fire if loading takes 8 % of the time",
        series=loading((15, 0.085)),
        until="15m",
    ),
    Case(
        title="Fires if GPUs are busy for 60 % of the time",
        series=busy("cuda:0", (3, 0.95), (14, 0.6), (7, 0.95)),
        alert=IDLE,
        fires_at="16m45s",
        recovers_at="23m30s",
    ),
    Case(
        title="Does not fire if GPUs are busy for 75 % of the time",
        series=busy("cuda:0", (20, 0.75)),
        until="20m",
    ),
    Case(
        title="Does not fire if a process uses half of its host's cores",
        series=busy("cpu", (20, 0.5)),
        until="20m",
    ),
)
