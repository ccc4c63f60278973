"""Test cases of the alerts on the numbers of training."""

from __future__ import annotations

from rules.history import GONE, SCRAPE, Series, Stretch, counter, gauge, of_both, training
from rules.promtool import Case

LABELS = {"component": "training", "job": "zerowatch", "run": "night-7"}
NOT_FINITE = {"alertname": "ZerowatchLossNotFinite", "severity": "critical", **LABELS}
COLLAPSE = {"alertname": "ZerowatchLossScaleCollapse", "severity": "critical", **LABELS}
SPIKE = {"alertname": "ZerowatchLossSpike", "severity": "warning", **LABELS}
EXPLODING = {"alertname": "ZerowatchGradientNormExploding", "severity": "warning", **LABELS}
SKIPPED = {"alertname": "ZerowatchUpdatesSkipped", "severity": "warning", **LABELS}
NONFINITE = "zerowatch_nonfinite_losses_total"
STARTED = "process_start_time_seconds"
RUN_STARTED = "zerowatch_run_start_timestamp_seconds"


def loss(*stretches: Stretch) -> Series:
    minutes = sum(stretch[0] for stretch in stretches)
    return training(minutes) | of_both("zerowatch_loss", gauge(*stretches))


def gradient_norm(*stretches: Stretch) -> Series:
    minutes = sum(stretch[0] for stretch in stretches)
    return training(minutes) | of_both("zerowatch_gradient_norm", gauge(*stretches))


def skipped(*stretches: Stretch) -> Series:
    """Two steps per second, of which so many are skipped."""
    minutes = sum(stretch[0] for stretch in stretches)
    return training(minutes) | of_both("zerowatch_skipped_steps_total", counter(*stretches))


def loss_scale(*stretches: Stretch) -> Series:
    minutes = sum(stretch[0] for stretch in stretches)
    return training(minutes) | of_both("zerowatch_loss_scale", gauge(*stretches))


# Half an hour of training, and then an evaluation. Its length does not matter to the alerts.
EVALUATING = of_both("zerowatch_steps_total", counter((30, 2), (20, 0)))
BEFORE_EVALUATION = 30 - SCRAPE
# A step takes three minutes.
SLOW_STEPS = of_both("zerowatch_steps_total", gauge(*((3, number) for number in range(20))))
# Prometheus is down for seven minutes, while the run goes on.
DOWN = ((90, 1), (7, GONE), (10, 1))
DOWN_FOR_7 = (
    of_both("zerowatch_run_active", gauge(*DOWN))
    | of_both(STARTED, gauge(*DOWN))
    | of_both(RUN_STARTED, gauge(*DOWN))
)
# A process that is older than an hour begins a further run.
FURTHER_RUN = ((72, GONE), (15, 1))

CASES = (
    Case(
        title="Fires at once on a loss that is not finite",
        series=training(17)
        | of_both("zerowatch_nonfinite_losses_total", counter((5, 0), (1, 1), (11, 0))),
        alert=NOT_FINITE,
        fires_at="5m15s",
        recovers_at="16m",
    ),
    Case(
        title="Does not fire again if a scrape fails half an hour later",
        near="ZerowatchLossNotFinite",
        series=training(40) | of_both(NONFINITE, gauge((2, 0), (26, 2), (SCRAPE, GONE), (12, 2))),
        since="20m",
        until="40m",
    ),
    Case(
        title="Does not fire again after seven minutes without scrapes",
        near="ZerowatchLossNotFinite",
        series=training(107)
        | DOWN_FOR_7
        | of_both(NONFINITE, gauge((2, 0), (88, 3), (7, GONE), (10, 3))),
        since="98m",
        until="107m",
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
        near="ZerowatchLossScaleCollapse",
        series=loss_scale((1, 4294967296), (1, 65536), (1, 1024), (12, 32)),
        until="15m",
    ),
    Case(
        title="Does not fire on a loss scale that is always 1",
        near="ZerowatchLossScaleCollapse",
        series=loss_scale((15, 1)),
        until="15m",
    ),
    Case(
        title="Fires if the first value of the counter of non-finite losses is above 0",
        series=training(10)
        | of_both(STARTED, gauge((10, 1)))
        | of_both(NONFINITE, gauge((2, None), (8, 20))),
        alert=NOT_FINITE,
        fires_at="2m15s",
        recovers_at="12m15s",
    ),
    Case(
        title="Fires if the first losses of a further run of a process are not finite",
        series=training(87)
        | of_both(STARTED, gauge(*FURTHER_RUN))
        | of_both(RUN_STARTED, gauge((72, GONE), (15, 72 * 60)))
        | of_both(NONFINITE, gauge((72, GONE), (15, 20))),
        alert=NOT_FINITE,
        fires_at="72m15s",
        recovers_at="82m15s",
    ),
    Case(
        title="Fires if the loss rises to six times its median",
        series=loss((30, 2), (5, 12), (15, 2)),
        alert=SPIKE,
        fires_at="32m15s",
        recovers_at="40m",
    ),
    Case(
        title="Fires if a negative loss rises above 0",
        series=loss((30, -2), (5, 1), (15, -2)),
        alert=SPIKE,
        fires_at="32m15s",
        recovers_at="40m",
    ),
    Case(
        title="Does not fire on a flat negative loss",
        near="ZerowatchLossSpike",
        series=loss((40, -2)),
        until="40m",
    ),
    Case(
        title="Does not fire on a loss that varies by its half",
        near="ZerowatchLossSpike",
        series=loss(*((1, 1.0), (1, 1.5), (1, 0.5)) * 14),
        until="40m",
    ),
    Case(
        title="Does not fire on a loss near 0 with usual deviations",
        near="ZerowatchLossSpike",
        series=loss(*((1, 0.01), (1, -0.3), (1, 0.3)) * 14),
        until="40m",
    ),
    Case(
        title="Does not fire on a high loss in the first quarter of an hour",
        near="ZerowatchLossSpike",
        series=loss((5, 2), (5, 12), (10, 2)),
        until="20m",
    ),
    Case(
        title="Does not fire on a single minute of a high loss",
        near="ZerowatchLossSpike",
        series=loss((30, 2), (1, 12), (10, 2)),
        until="41m",
    ),
    Case(
        title="Does not fire during an evaluation on the high loss of the step before",
        near="ZerowatchLossSpike",
        series=loss((BEFORE_EVALUATION, 2), (20, 12)) | EVALUATING,
        until="50m",
    ),
    Case(
        title="Fires if the loss is high in steps of three minutes",
        series=loss((30, 2), (15, 12), (5, 2)) | SLOW_STEPS,
        alert=SPIKE,
        fires_at="41m15s",
        recovers_at="50m15s",
    ),
    Case(
        title="Does not fire on one high loss of a step of three minutes",
        near="ZerowatchLossSpike",
        series=loss((30, 2), (3, 12), (7, 2)) | SLOW_STEPS,
        until="40m",
    ),
    Case(
        title="Fires if the gradient norm rises to a thousand times its median",
        series=gradient_norm((30, 1), (5, 1000), (15, 1)),
        alert=EXPLODING,
        fires_at="31m15s",
        recovers_at="40m",
    ),
    Case(
        title="Fires if the gradient norm is infinite",
        series=gradient_norm((30, 1), (5, float("inf")), (15, 1)),
        alert=EXPLODING,
        fires_at="31m15s",
        recovers_at="40m",
    ),
    Case(
        title="Does not fire if the gradient norm rises to nine times its median",
        near="ZerowatchGradientNormExploding",
        series=gradient_norm((30, 1), (15, 9)),
        until="45m",
    ),
    Case(
        title="Does not fire during an evaluation on the high gradient norm of the step before",
        near="ZerowatchGradientNormExploding",
        series=gradient_norm((BEFORE_EVALUATION, 1), (20, 1000)) | EVALUATING,
        until="50m",
    ),
    Case(
        title="Fires if the gradient norm is high in steps of three minutes",
        series=gradient_norm((30, 1), (15, 1000), (5, 1)) | SLOW_STEPS,
        alert=EXPLODING,
        fires_at="40m15s",
        recovers_at="50m15s",
    ),
    Case(
        title="Does not fire on one high gradient norm of a step of three minutes",
        near="ZerowatchGradientNormExploding",
        series=gradient_norm((30, 1), (3, 1000), (7, 1)) | SLOW_STEPS,
        until="40m",
    ),
    Case(
        title="Fires if all updates are skipped",
        series=skipped((10, 0), (15, 2), (10, 0)),
        alert=SKIPPED,
        fires_at="17m30s",
        recovers_at="32m30s",
    ),
    Case(
        title="Does not fire if a third of the updates are skipped",
        near="ZerowatchUpdatesSkipped",
        series=skipped((10, 0), (15, 0.66)),
        until="25m",
    ),
)
