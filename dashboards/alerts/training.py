"""Alerts on slow data, idle GPUs, a lower MFU than usual, and late or failed checkpoints."""

from __future__ import annotations

from ...metrics.catalog import training
from ...metrics.thresholds import (
    CHECKPOINT_AGE_HIGH,
    CHECKPOINT_DELAY_HIGH,
    DATA_RATIO_HIGH,
    DEVICE_UTILIZATION_LOW,
    MFU_DROP_LOW,
)
from .. import recording_rules as recorded
from ..limits import above, below, shown
from ..promql import ON_GPU, by, increase, last_value, ratio, where
from ..timing import HOUR, MINUTE, Timing
from .alert import DURATION, NUMBER, PERCENT, RUN, Alert, InhibitRule
from .guards import after_new_step, after_some_steps, after_some_time, while_training

# Uids of the dashboards that alerts link to.
OVERVIEW = "zerowatch-overview"
ANATOMY = "zerowatch-step-anatomy"
DATA_BOUND = "ZerowatchDataBound"
LOW_DEVICE_UTILIZATION = "ZerowatchLowDeviceUtilization"
MFU_DROPPED = "ZerowatchMfuDropped"
# No checkpoint is overdue before this age: an evaluation may take as long.
LEAST_CHECKPOINT_AGE_SECONDS = 30 * MINUTE


def training_alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return the alerts; `timing` sets their PromQL ranges."""
    return (
        _data_bound(timing),
        _low_device_utilization(timing),
        _mfu_dropped(timing),
        _checkpoint_overdue(timing),
        _checkpoint_failed(timing),
    )


def _data_bound(timing: Timing) -> Alert:
    loading = above(recorded.PHASE_RATIO.select('phase="data"'), DATA_RATIO_HIGH)
    return Alert(
        name=DATA_BOUND,
        component="training",
        severity="warning",
        expression=while_training(after_some_steps(loading, timing)),
        for_seconds=10 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Training {RUN} waits for data",
        description=(
            f"Loading data takes {PERCENT} of the training time; a loader that prefetches needs "
            "almost none. Give the DataLoader more workers, and check whether the disk is fast "
            "enough."
        ),
        dashboard=ANATOMY,
        inhibits=InhibitRule(alerts=(LOW_DEVICE_UTILIZATION, MFU_DROPPED)),
    )


def _low_device_utilization(timing: Timing) -> Alert:
    # GPUs only. On a CPU the utilization is a share of all cores, of which each of two ranks on a
    # host can have at most half.
    busy = by("avg", recorded.DEVICE_UTILIZATION_BY_RANK.select(ON_GPU))
    return Alert(
        name=LOW_DEVICE_UTILIZATION,
        component="devices",
        severity="warning",
        expression=while_training(after_some_steps(below(busy, DEVICE_UTILIZATION_LOW), timing)),
        for_seconds=10 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"The GPUs of training {RUN} are idle too often",
        description=(
            f"The GPUs are busy for {PERCENT} of the time, less than "
            f"{shown(DEVICE_UTILIZATION_LOW)}. The dashboard Step anatomy shows what they wait "
            "for. If they wait for nothing, try a larger micro-batch."
        ),
        dashboard="zerowatch-devices",
    )


def _mfu_dropped(timing: Timing) -> Alert:
    now = f"avg_over_time({recorded.MFU.select()}[{timing.short}])"
    dropped = below(ratio(now, recorded.MFU_USUAL.select()), MFU_DROP_LOW)
    dropped = after_new_step(dropped, timing.short)
    return Alert(
        name=MFU_DROPPED,
        component="training",
        severity="warning",
        expression=while_training(
            after_some_steps(after_some_time(dropped, recorded.MFU, timing.long), timing)
        ),
        for_seconds=10 * MINUTE,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Training {RUN} has become slower than it was",
        description=(
            f"The model FLOPs utilization is {PERCENT} of the median of the run's own last six "
            f"hours; {shown(MFU_DROP_LOW)} or more is usual. Something changed since: compare the "
            "phases of a step, the clocks of the GPUs and the links before and after."
        ),
        dashboard=ANATOMY,
    )


def _checkpoint_overdue(timing: Timing) -> Alert:
    age = f"(time() - {recorded.UNSAVED_SINCE.select()})"
    # Of the process before, until this one has saved twice.
    interval = recorded.CHECKPOINT_INTERVAL_IN_WEEK.select()
    least = timing.seconds(LEAST_CHECKPOINT_AGE_SECONDS)
    late = above(f"{age}\n/ on (job, run) ({interval} > 0)", CHECKPOINT_DELAY_HIGH)
    old = f"{above(age, CHECKPOINT_AGE_HIGH)}\nunless on (job, run) {interval} > 0"
    overdue = f"{age} > {least}\nand on (job, run) (\n{late}\nor on (job, run) ({old})\n)"
    # This one is known only while rank 0 is read.
    overdue = where(overdue, recorded.LAST_CHECKPOINT_IN_WEEK.select())
    return Alert(
        name="ZerowatchCheckpointOverdue",
        component="training",
        severity="warning",
        expression=while_training(overdue),
        for_seconds=MINUTE,
        keep_firing_seconds=10 * MINUTE,  # a crash loop raises one alert, not one for each process
        summary=f"Training {RUN} has not saved a checkpoint for too long",
        description=(
            f"The run has trained for {DURATION} without saving a checkpoint, far longer than is "
            "usual for it. If the run fails now, this much work is lost; if it was restarted since "
            "then, part of it already is. Check the space on the file system and the log of rank 0."
        ),
        dashboard=OVERVIEW,
    )


def _checkpoint_failed(timing: Timing) -> Alert:
    # An error in saving often ends the script, which serves it for a single scrape. So the last
    # value of a process counts as well, and an evaluation may follow the end of the run.
    failed = increase(training.CHECKPOINTS, timing, HOUR, 'outcome="failed"', of_ended=True)
    active = f"{last_value(training.RUN_ACTIVE, timing, seconds=2 * MINUTE)} == 1"
    return Alert(
        name="ZerowatchCheckpointFailed",
        component="training",
        severity="warning",
        expression=where(f"{by('max', failed)} > 0", active),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Training {RUN} could not save a checkpoint",
        description=(
            f"Saving a checkpoint failed {NUMBER} times in the last hour. If the run fails now, it "
            "has to continue from an older checkpoint. The log has the error. Check the space, the "
            "quota and the permissions of the folder."
        ),
        dashboard=OVERVIEW,
    )
