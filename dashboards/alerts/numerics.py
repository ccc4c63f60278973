"""Alerts on the numbers of training: loss, gradient norm, loss scale and skipped updates."""

from __future__ import annotations

from ...metrics.catalog import training
from ...metrics.thresholds import (
    GRADIENT_NORM_HIGH,
    LOSS_SCALE_FALL,
    LOSS_SCALE_LOW,
    LOSS_SPIKE_HIGH,
    SKIPPED_RATIO_HIGH,
    Threshold,
)
from .. import recording_rules as recorded
from ..limits import above, below, shown
from ..promql import by, increase, select, where
from ..timing import MINUTE, SHORT_SECONDS, Timing
from .alert import NUMBER, PERCENT, RUN, Alert, InhibitRule
from .guards import (
    after_new_step,
    after_some_steps,
    after_some_time,
    steps_taken,
    while_training,
)
from .training import ANATOMY

HISTORY_SECONDS = 15 * MINUTE  # the least from which a median is compared with the present
SLOW_STEPS_SECONDS = 10 * MINUTE  # soon enough: after half an hour the median has followed


def numerics_alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return the alerts; `timing` sets their PromQL ranges."""
    return (
        _loss_not_finite(timing),
        _loss_scale_collapse(timing),
        _loss_spike(timing),
        _gradient_norm_exploding(timing),
        _updates_skipped(timing),
    )


def _loss_not_finite(timing: Timing) -> Alert:
    losses = by("max", increase(training.NONFINITE_LOSSES, timing, SHORT_SECONDS))
    return Alert(
        name="ZerowatchLossNotFinite",
        component="training",
        severity="critical",
        expression=while_training(f"{losses} > 0"),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"The loss of training {RUN} is not a finite number",
        description=(
            f"The loss was NaN or infinite in {NUMBER} steps of the last five minutes. If "
            "the loss stays so, stop the run and return to the last good checkpoint."
        ),
        dashboard=ANATOMY,
    )


def _loss_scale_collapse(timing: Timing) -> Alert:
    lowest = by("min", select(training.LOSS_SCALE))
    highest = by("max", f"max_over_time({select(training.LOSS_SCALE)}[{timing.hour}])")
    fell = where(
        below(lowest, LOSS_SCALE_LOW, or_equal=True),
        f"({below(f'{lowest} / {highest}', LOSS_SCALE_FALL, or_equal=True)})",
    )
    return Alert(
        name="ZerowatchLossScaleCollapse",
        component="training",
        severity="critical",
        expression=while_training(fell),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"The loss scale of training {RUN} has collapsed",
        description=(
            f"The loss scale has fallen to {NUMBER}, because gradients overflow at every scale. "
            "DeepSpeed ends the run when the scale reaches its minimum. Look at the loss and the "
            "gradient norm before the fall."
        ),
        dashboard=ANATOMY,
        inhibits=InhibitRule(alerts=("ZerowatchUpdatesSkipped",)),
    )


def _lasting(
    rule: recorded.RecordingRule, threshold: Threshold, timing: Timing, seconds: float
) -> str:
    """Return the values of a gauge of a step that are above a threshold in step after step.

    Args:
        rule: A figure of the last step of each run.
        threshold: The threshold.
        timing: Scales the ranges.
        seconds: How long the alert waits. If no step ends within that time, the value must be high
            for ten minutes, and in several steps.
    """
    now = after_new_step(above(rule.select(), threshold), timing.duration(seconds))
    time_range = timing.duration(SLOW_STEPS_SECONDS)
    of_slow_steps = where(
        above(f"min_over_time({rule.select()}[{time_range}])", threshold),
        f"{steps_taken(time_range)} >= 2",
    )
    return f"(\n{now}\nor {of_slow_steps}\n)"


def _loss_spike(timing: Timing) -> Alert:
    spike = _lasting(recorded.LOSS_SPIKE, LOSS_SPIKE_HIGH, timing, 2 * MINUTE)
    return Alert(
        name="ZerowatchLossSpike",
        component="training",
        severity="warning",
        expression=while_training(
            after_some_time(spike, recorded.LOSS, timing.duration(HISTORY_SECONDS))
        ),
        for_seconds=2 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"The loss of training {RUN} has risen far above its level of the last hour",
        description=(
            f"The loss is {PERCENT} above the median of the last hour, relative to the median and "
            f"to usual deviations; above {shown(LOSS_SPIKE_HIGH)} counts as a spike. If the loss "
            "does not fall again within some hundred steps, return to a checkpoint from before."
        ),
        dashboard=ANATOMY,
    )


def _gradient_norm_exploding(timing: Timing) -> Alert:
    high = _lasting(recorded.GRADIENT_NORM_RATIO, GRADIENT_NORM_HIGH, timing, MINUTE)
    return Alert(
        name="ZerowatchGradientNormExploding",
        component="training",
        severity="warning",
        expression=while_training(
            after_some_time(high, recorded.GRADIENT_NORM, timing.duration(HISTORY_SECONDS))
        ),
        for_seconds=MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"The gradient norm of training {RUN} is far above its level of the last hour",
        description=(
            f"The gradient norm is {NUMBER} times the median of the last hour; up to "
            f"{shown(GRADIENT_NORM_HIGH)} is usual. The loss often follows within some steps. Look "
            "at gradient clipping, the learning rate and the last batches."
        ),
        dashboard=ANATOMY,
    )


def _updates_skipped(timing: Timing) -> Alert:
    skipped = above(recorded.SKIPPED_RATIO.select(), SKIPPED_RATIO_HIGH)
    return Alert(
        name="ZerowatchUpdatesSkipped",
        component="training",
        severity="warning",
        expression=while_training(after_some_steps(skipped, timing)),
        for_seconds=5 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Training {RUN} skips its updates",
        description=(
            f"{PERCENT} of the steps of the last five minutes changed no weights, because their "
            "gradients overflowed. Some skipped steps after the start are usual, until the loss "
            "scale fits. Look at the loss scale and the gradient norm."
        ),
        dashboard=ANATOMY,
    )
