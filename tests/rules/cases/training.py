"""Test cases of the alerts on slow data, idle GPUs, a lower MFU and checkpoints."""

from __future__ import annotations

from itertools import pairwise

from rules.history import (
    GONE,
    SCRAPE,
    Series,
    Stretch,
    counter,
    gauge,
    of_both,
    of_rank,
    training,
    training_rank,
)
from rules.promtool import Case, annotations_of

LABELS = {"component": "training", "job": "zerowatch", "run": "night-7"}
DATA_BOUND = {"alertname": "ZerowatchDataBound", "severity": "warning", "phase": "data", **LABELS}
IDLE = {
    "alertname": "ZerowatchLowDeviceUtilization",
    "severity": "warning",
    **LABELS,
    "component": "devices",
}
DROPPED = {"alertname": "ZerowatchMfuDropped", "severity": "warning", **LABELS}
OVERDUE = {"alertname": "ZerowatchCheckpointOverdue", "severity": "warning", **LABELS}
FAILED = {"alertname": "ZerowatchCheckpointFailed", "severity": "warning", **LABELS}


def loading(*stretches: Stretch) -> Series:
    """Seconds of loading for each 0.98 seconds of the rest."""
    minutes = sum(stretch[0] for stretch in stretches)
    seconds = counter(*stretches)
    return training(minutes) | of_both("zerowatch_phase_seconds_total", seconds, phase="data")


def busy(device: str, *stretches: Stretch) -> Series:
    """A device that is busy for these shares of each second."""
    series = training(sum(stretch[0] for stretch in stretches))
    idle = tuple((minutes, 1 - ratio) for minutes, ratio in stretches)
    for state, seconds in (("busy", stretches), ("idle", idle)):
        growth = counter(*seconds)
        series |= of_both("zerowatch_device_seconds_total", growth, device=device, state=state)
    return series


def mfu(*stretches: Stretch) -> Series:
    minutes = sum(stretch[0] for stretch in stretches)
    return training(minutes) | of_both("zerowatch_mfu_ratio", gauge(*stretches))


SAVED = "zerowatch_last_checkpoint_timestamp_seconds"
NUMBER_SAVED = "zerowatch_checkpoints_total"
STARTED = "process_start_time_seconds"


def saved(minutes: float, *at_minutes: float) -> Series:
    """A run that has saved checkpoints at these times."""
    moments = [*at_minutes, minutes]
    stretches = [(later - at, 60 * at) for at, later in pairwise(moments)]
    last = gauge((at_minutes[0], None), *stretches)
    numbers = enumerate(stretches, start=1)
    number = gauge((at_minutes[0], 0), *((length, count) for count, (length, _) in numbers))
    return (
        training(minutes)
        | of_rank(0, STARTED, gauge((minutes, 1)))
        | of_rank(0, SAVED, last)
        | of_rank(0, NUMBER_SAVED, number, outcome="saved")
    )


def restarted(saves_each: int, ends: int, fires_at: str, until: int) -> Case:
    """Return a run whose second process saves no checkpoint for a long time.

    Args:
        saves_each: Minutes between two checkpoints of the first process.
        ends: The minute in which the first process ends. The second begins two minutes later.
        fires_at: When the alert on an overdue checkpoint fires.
        until: The minute in which the second process saves a checkpoint.
    """
    lives = ((ends, 1), (2, GONE), (until + 2 - ends, 1))
    saves = [*range(saves_each, ends, saves_each), ends]
    stretches = [(later - at, 60 * at) for at, later in pairwise(saves)]
    numbers = ((length, count) for count, (length, _) in enumerate(stretches, start=1))
    without = until - ends
    last = gauge((saves_each, GONE), *stretches, (without, GONE), (4, 60 * until))
    number = gauge((saves_each, 0), *numbers, (2, GONE), (without - 2, 0), (4, 1))
    return Case(
        title="Fires until a checkpoint is saved",
        series=training_rank(0, *lives)
        | training_rank(1, *lives)
        | of_rank(0, STARTED, gauge((ends, 1), (2, GONE), (until, 60 * (ends + 2))))
        | of_rank(0, SAVED, last)
        | of_rank(0, NUMBER_SAVED, number, outcome="saved"),
        alert=OVERDUE,
        fires_at=fires_at,
        recovers_at=f"{until}m30s",
    )


def failing(pause: float, early: int = 3) -> Series:
    """Return a run of which only the first process lives until its next checkpoint.

    It saves each 20 minutes, and ends after 41. The next ones end after 25 minutes; the last one
    saves after 45.

    Args:
        pause: Minutes between two processes.
        early: How many processes end before they save.
    """
    without = (early + 1) * pause + early * 25 + 45
    lives: list[Stretch] = [(41, 1)]
    begun: list[Stretch] = [(41, 1)]
    for number, minutes in enumerate((*early * (25,), 50)):
        lives += [(pause, GONE), (minutes, 1)]
        begun += [(pause, GONE), (minutes, 60 * (41 + pause + number * (25 + pause)))]
    saves = gauge((20, GONE), (20, 1200), (1, 2400), (without, GONE), (5, 60 * (41 + without)))
    number = gauge((20, 0), (20, 1), (1, 2), (pause, GONE), (without - pause, 0), (5, 1))
    return (
        training_rank(0, *lives)
        | training_rank(1, *lives)
        | of_rank(0, STARTED, gauge(*begun))
        | of_rank(0, SAVED, saves)
        | of_rank(0, NUMBER_SAVED, number, outcome="saved")
    )


def unread(*stretches: Stretch, saves: Series) -> Series:
    """Return a run of two ranks, of which the first is not read for some time."""
    minutes = sum(stretch[0] for stretch in stretches)
    ranks = training_rank(0, *stretches) | training_rank(1, (minutes, 1))
    return ranks | of_rank(0, STARTED, gauge(*stretches)) | saves


RESUMED_LATER = ((34.75, 1), (0.25, 0), (45, GONE), (20, 1))
RESUMED = ((30, 1), (0.25, 0), (59.75, GONE), (25, 1))
AFTER_A_PAUSE = ((70, 1), (0.25, 0), (199.75, GONE), (110, 1))
# Not among the cases, because the vanished rank raises its own alert.
RANK_0_UNREAD = Case(
    title="Does not fire if rank 0 saves each ten minutes, but is not read for an hour",
    near="ZerowatchCheckpointOverdue",
    series=unread(
        (31, 1),
        (64, GONE),
        (25, 1),
        saves=of_rank(
            0,
            SAVED,
            gauge((10, GONE), (10, 600), (10, 1200), (1, 1800), (64, GONE), (25, 90 * 60)),
        )
        | of_rank(
            0,
            NUMBER_SAVED,
            gauge((10, 0), (10, 1), (10, 2), (1, 3), (64, GONE), (25, 9)),
            outcome="saved",
        ),
    ),
    until="115m",
)
# Not among the cases either: the run dies in between.
LONG_PAUSES = Case(
    title="Fires if each process ends before its next checkpoint, and is back after 70 minutes",
    series=failing(pause=70, early=2),
    alert=OVERDUE,
    fires_at="312m",
    recovers_at="356m15s",
)
_TO_THE_END = ((10, 1), (SCRAPE, 1), (10, GONE))
# Nor is this: the run has died.
FAILED_AT_THE_END = Case(
    title="Fires if a single scrape has read the error that ends the run",
    series=training_rank(0, *_TO_THE_END)
    | training_rank(1, *_TO_THE_END)
    | of_rank(0, NUMBER_SAVED, gauge((10, 0), (SCRAPE, 1), (10, GONE)), outcome="failed"),
    alert=FAILED,
    fires_at="10m15s",
    recovers_at="17m15s",
)
CASES = (
    Case(
        title="Fires if loading takes 12.5 % of the time",
        series=loading((12, 0.14), (8, 0)),
        alert=DATA_BOUND,
        fires_at="10m15s",
        recovers_at="18m15s",
    ),
    Case(
        title="Does not fire if loading takes 8 % of the time",
        near="ZerowatchDataBound",
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
        near="ZerowatchLowDeviceUtilization",
        series=busy("cuda:0", (20, 0.75)),
        until="20m",
    ),
    Case(
        title="Does not fire if a process uses half of its host's cores",
        near="ZerowatchLowDeviceUtilization",
        series=busy("cpu", (20, 0.5)),
        until="20m",
    ),
    Case(
        title="Fires if the MFU falls to half of what it was",
        series=mfu((40, 0.4), (20, 0.2), (10, 0.4)),
        alert=DROPPED,
        fires_at="53m15s",
        recovers_at="67m15s",
        annotations=annotations_of(
            "ZerowatchMfuDropped",
            dashboard="zerowatch-step-anatomy",
            summary="Training night-7 has become slower than it was",
            description="The model FLOPs utilization is 50% of the median of the run's own last "
            "six hours; 70% or more is usual. Something changed since: compare the phases of a "
            "step, the clocks of the GPUs and the links before and after.",
        ),
        words_at="56m",
    ),
    Case(
        title="Does not fire if the MFU falls by a quarter",
        near="ZerowatchMfuDropped",
        series=mfu((40, 0.4), (20, 0.3)),
        until="60m",
    ),
    Case(
        title="Does not fire during an evaluation on the low MFU of the step before",
        near="ZerowatchMfuDropped",
        series=mfu((40 - SCRAPE, 0.4), (20, 0.1))
        | of_both("zerowatch_steps_total", counter((40, 2), (20, 0))),
        until="60m",
    ),
    Case(
        title="Does not fire on a low MFU that was always low",
        near="ZerowatchMfuDropped",
        series=mfu((45, 0.05)),
        until="45m",
    ),
    Case(
        title="Fires if a run that saves every 20 minutes has not saved for an hour",
        series=saved(130, 20, 40, 60, 125),
        alert=OVERDUE,
        fires_at="121m",
        recovers_at="135m15s",
    ),
    Case(
        title="Does not fire if a run that saves every 20 minutes has not saved for 50",
        near="ZerowatchCheckpointOverdue",
        series=saved(111, 20, 40, 60, 110),
        until="111m",
    ),
    Case(
        title="Does not fire on a run that saves each minute and then evaluates for 25",
        near="ZerowatchCheckpointOverdue",
        series=saved(35, 1, 2, 3, 4, 5, 6, 7, 8, 34),
        until="35m",
    ),
    Case(
        title="Does not fire if two ranks save the only checkpoint a few milliseconds apart",
        near="ZerowatchCheckpointOverdue",
        series=training(60)
        | of_rank(0, SAVED, gauge((10, GONE), (50, 600)))
        | of_rank(1, SAVED, gauge((10.25, GONE), (49.75, 600.004))),
        until="60m",
    ),
    Case(
        title="Does not fire if a run is resumed an hour after it has saved each ten minutes",
        near="ZerowatchCheckpointOverdue",
        series=training_rank(0, *RESUMED)
        | training_rank(1, *RESUMED)
        | of_rank(0, SAVED, gauge((5, GONE), (10, 300), (10, 900), (5, 1500), (85, GONE)))
        | of_rank(0, STARTED, gauge((30, 1), (60, GONE), (25, 5390))),
        until="115m",
    ),
    Case(
        title="Fires if a run that was down for hours does not save again after 20 minutes",
        series=training_rank(0, *AFTER_A_PAUSE)
        | training_rank(1, *AFTER_A_PAUSE)
        | of_rank(0, STARTED, gauge((70, 1), (200, GONE), (110, 270 * 60)))
        | of_rank(
            0,
            SAVED,
            gauge(
                (20, GONE),
                (20, 1200),
                (20, 2400),
                (10, 3600),
                (220, GONE),
                (80, 290 * 60),
                (10, 370 * 60),
            ),
        )
        | of_rank(
            0,
            NUMBER_SAVED,
            gauge((20, 0), (20, 1), (20, 2), (10, 3), (200, GONE), (20, 0), (90, 1)),
            outcome="saved",
        ),
        alert=OVERDUE,
        fires_at="351m",
        recovers_at="380m15s",
    ),
    Case(
        title="Does not fire on a run that never saves",
        near="ZerowatchCheckpointOverdue",
        series=training(35),
        until="35m",
    ),
    Case(
        title="Fires on if each process ends before its next checkpoint and is back a minute later",
        series=failing(pause=1),
        alert=OVERDUE,
        fires_at="104m30s",
        recovers_at="175m15s",
    ),
    Case(
        title="Does not fire if a run that saves each ten minutes is resumed 45 minutes later",
        near="ZerowatchCheckpointOverdue",
        series=training_rank(0, *RESUMED_LATER)
        | training_rank(1, *RESUMED_LATER)
        | of_rank(0, STARTED, gauge((35, 1), (45, GONE), (20, 80 * 60)))
        | of_rank(
            0,
            SAVED,
            gauge((10, GONE), (10, 600), (10, 1200), (5, 1800), (57, GONE), (8, 92 * 60)),
        )
        | of_rank(
            0,
            NUMBER_SAVED,
            gauge((10, 0), (10, 1), (10, 2), (5, 3), (45, GONE), (12, 0), (8, 1)),
            outcome="saved",
        ),
        until="100m",
    ),
    Case(
        title="Fires on while a few scrapes of rank 0 fail",
        series=unread(
            (70, 1),
            (0.5, GONE),
            (14.5, 1),
            saves=of_rank(
                0,
                SAVED,
                gauge((10, GONE), (10, 600), (50, 1200), (0.5, GONE), (9.5, 1200), (5, 80 * 60)),
            )
            | of_rank(
                0,
                NUMBER_SAVED,
                gauge((10, 0), (10, 1), (50, 2), (0.5, GONE), (9.5, 2), (5, 3)),
                outcome="saved",
            ),
        ),
        alert=OVERDUE,
        fires_at="51m15s",
        recovers_at="90m15s",
    ),
    Case(
        title="Fires for an hour if a checkpoint cannot be saved",
        series=training(80) | of_both(NUMBER_SAVED, gauge((3, 0), (77, 1)), outcome="failed"),
        alert=FAILED,
        fires_at="3m15s",
        recovers_at="68m",
        annotations=annotations_of(
            "ZerowatchCheckpointFailed",
            dashboard="zerowatch-overview",
            summary="Training night-7 could not save a checkpoint",
            description="Saving a checkpoint failed 1 times in the last hour. If the run fails "
            "now, it has to continue from an older checkpoint. The log has the error. Check the "
            "space, the quota and the permissions of the folder.",
        ),
    ),
    Case(
        title="Fires on if the error ends the process, and the next one trains",
        series=training_rank(0, (10.2, 1), (1, GONE), (69, 1))
        | training_rank(1, (10.2, 1), (1, GONE), (69, 1))
        | of_rank(0, NUMBER_SAVED, gauge((10, 0), (0.2, 1), (1, GONE), (69, 0)), outcome="failed"),
        alert=FAILED,
        fires_at="10m15s",
        recovers_at="75m",
    ),
    Case(
        title="Does not fire if the script catches the error, and the run has ended in good order",
        near="ZerowatchCheckpointFailed",
        series=training_rank(0, (10, 1), (0.5, 0), (4, GONE))
        | training_rank(1, (10, 1), (0.5, 0), (4, GONE))
        | of_rank(0, NUMBER_SAVED, gauge((10, 0), (0.5, 1), (4, GONE)), outcome="failed"),
        until="14m",
    ),
    Case(
        title="Does not fire if all checkpoints are saved",
        near="ZerowatchCheckpointFailed",
        series=saved(19, 5, 10, 15) | of_both(NUMBER_SAVED, gauge((19, 0)), outcome="failed"),
        until="19m",
    ),
)
