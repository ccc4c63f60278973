"""Alerts on stalls, unreachable ranks, non-finite losses, slow data, idle GPUs and restarts."""

from __future__ import annotations

from ...metrics.catalog import training, window
from ...metrics.thresholds import (
    DATA_RATIO_HIGH,
    DEVICE_UTILIZATION_LOW,
    LOSS_SCALE_FALL,
    LOSS_SCALE_LOW,
    RESTARTS_HIGH,
)
from .. import recording_rules as recorded
from ..promql import ON_GPU, by, select, where
from ..timing import MINUTE, Timing
from .alert import NUMBER, PERCENT, RANK, RUN, Alert, InhibitRule
from .communication import COMM_BOTTLENECK, LINK_SLOW, STRAGGLER_RANK
from .guards import after_some_steps, while_training

# Uids of the dashboards that alerts link to.
OVERVIEW = "zerowatch-overview"
ANATOMY = "zerowatch-step-anatomy"
DATA_BOUND = "ZerowatchDataBound"
LOW_DEVICE_UTILIZATION = "ZerowatchLowDeviceUtilization"
# A rank that does not answer is down if it was training within this time.
REMEMBERED_SECONDS = 15 * MINUTE


def training_alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return the alerts; `timing` sets their PromQL ranges."""
    return (
        _training_stalled(timing),
        _rank_down(timing),
        _loss_not_finite(timing),
        _loss_scale_collapse(timing),
        _data_bound(timing),
        _low_device_utilization(timing),
        _restarting(timing),
    )


def _training_stalled(timing: Timing) -> Alert:
    # During an evaluation there are no steps either, but the time of the last activity changes.
    # Only timestamps of the same host are subtracted, so that clocks may differ between hosts.
    steps = by("max", f"changes({select(training.STEPS)}[{timing.short}])")
    moves = by("max", f"delta({select(training.LAST_ACTIVITY_TIMESTAMP)}[{timing.short}])")
    stalled = where(where(by("max", select(training.STEPS)), f"{steps} == 0"), f"{moves} < 1")
    return Alert(
        name="ZerowatchTrainingStalled",
        component="training",
        severity="critical",
        expression=while_training(stalled),
        for_seconds=5 * MINUTE,
        keep_firing_seconds=0,  # a new step proves that the stall is over
        summary=f"Training {RUN} has stalled",
        description=(
            f"No rank has made progress for ten minutes. The run has completed {NUMBER} steps. "
            "Read hang-rank-*.txt in the run folder: the first line names the missing ranks, and "
            "where they are missing."
        ),
        dashboard=OVERVIEW,
        inhibits=InhibitRule(
            alerts=(
                COMM_BOTTLENECK,
                DATA_BOUND,
                LINK_SLOW,
                LOW_DEVICE_UTILIZATION,
                STRAGGLER_RANK,
            )
        ),
    )


def _rank_down(timing: Timing) -> Alert:
    # A rank that ended normally has exported run_active 0. After a restart a rank may answer on
    # another port, and the old address is then ignored.
    active = f"last_over_time({select(training.RUN_ACTIVE)}[{timing.duration(REMEMBERED_SECONDS)}])"
    return Alert(
        name="ZerowatchRankDown",
        component="training",
        severity="critical",
        expression=(
            f"up == 0\nand on (job, instance, run, rank) {active} == 1\n"
            "unless on (job, run, rank) up == 1"
        ),
        for_seconds=MINUTE,
        keep_firing_seconds=0,  # an answer proves that the rank is up
        summary=f"Rank {RANK} of training {RUN} does not answer",
        description=(
            "The rank was last seen training on {{ $labels.node }} "
            "({{ $labels.instance }}). Check whether its process is alive, and read the end "
            "of its log. While this alert fires, the other alerts of the run are inhibited."
        ),
        dashboard=OVERVIEW,
        inhibits=InhibitRule(),
    )


def _loss_not_finite(timing: Timing) -> Alert:
    losses = by("max", f"increase({select(training.NONFINITE_LOSSES)}[{timing.short}])")
    return Alert(
        name="ZerowatchLossNotFinite",
        component="training",
        severity="critical",
        expression=while_training(f"{losses} > 0"),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"The loss of training {RUN} is not a finite number",
        description=(
            f"The loss was NaN or infinite in {NUMBER} steps of the last five minutes. The "
            "dashboard shows whether this continues. If it does, stop the run and return to the "
            "last good checkpoint."
        ),
        dashboard=ANATOMY,
    )


def _loss_scale_collapse(timing: Timing) -> Alert:
    lowest = by("min", select(training.LOSS_SCALE))
    hour = timing.duration(60 * MINUTE)
    highest = by("max", f"max_over_time({select(training.LOSS_SCALE)}[{hour}])")
    fell = where(f"{lowest} <= {LOSS_SCALE_LOW:g}", f"{lowest} / {highest} <= {LOSS_SCALE_FALL}")
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
    )


def _data_bound(timing: Timing) -> Alert:
    loading = recorded.PHASE_RATIO.select('phase="data"')
    return Alert(
        name=DATA_BOUND,
        component="training",
        severity="warning",
        expression=while_training(after_some_steps(f"{loading} > {DATA_RATIO_HIGH}", timing)),
        for_seconds=10 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Training {RUN} waits for data",
        description=(
            f"Loading data takes {PERCENT} of the training time; a loader that prefetches needs "
            "almost none. Give the DataLoader more workers, and check whether the disk is fast "
            "enough."
        ),
        dashboard=ANATOMY,
        inhibits=InhibitRule(alerts=(LOW_DEVICE_UTILIZATION,)),
    )


def _low_device_utilization(timing: Timing) -> Alert:
    # GPUs only. On a CPU the utilization is a share of all cores, of which each of two ranks on a
    # host can have at most half.
    busy = by("avg", recorded.DEVICE_UTILIZATION_BY_RANK.select(ON_GPU))
    return Alert(
        name=LOW_DEVICE_UTILIZATION,
        component="devices",
        severity="warning",
        expression=while_training(
            after_some_steps(f"{busy} < {DEVICE_UTILIZATION_LOW}", timing),
        ),
        for_seconds=10 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"The GPUs of training {RUN} are idle too often",
        description=(
            f"The GPUs are busy for {PERCENT} of the time, less than {DEVICE_UTILIZATION_LOW:.0%}. "
            "The dashboard Step anatomy shows what they wait for. If they wait for nothing, try a "
            "larger micro-batch."
        ),
        dashboard="zerowatch-devices",
    )


def _restarting(timing: Timing) -> Alert:
    # changes() of one series would miss restarts, because a restarted rank may use another port.
    restarts = f"{select(window.RESTARTS)}[{timing.long}]"
    highest = by("max", f"max_over_time({restarts})")
    lowest = by("min", f"min_over_time({restarts})")
    return Alert(
        name="ZerowatchRestarting",
        component="training",
        severity="critical",
        expression=while_training(f"{highest} - {lowest} >= {RESTARTS_HIGH}"),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Training {RUN} keeps restarting",
        description=(
            f"The run restarted {NUMBER} times within half an hour. Each time it resumes from its "
            "last checkpoint, and it may not get much further. Read the end of the log of the rank "
            "that ended first."
        ),
        dashboard="zerowatch-memory",
    )
