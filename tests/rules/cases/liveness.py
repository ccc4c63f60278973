"""Test cases of the alerts on runs and ranks that died, hang or never began."""

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
OF_RANK_1 = {**LABELS, "node": "node-1", "rank": "1"}
STALLED = {"alertname": "ZerowatchTrainingStalled", "severity": "critical", **LABELS}
DIED = {"alertname": "ZerowatchRunDied", "severity": "critical", **LABELS}
VANISHED = {
    "alertname": "ZerowatchRankVanished",
    "severity": "critical",
    "instance": "10.0.0.1:9464",
    **OF_RANK_1,
}
HUNG = {"alertname": "ZerowatchRankHung", "severity": "critical", **OF_RANK_1}
NO_FIRST_STEP = {"alertname": "ZerowatchNoFirstStep", "severity": "critical", **LABELS}
NEVER_UP = {
    "alertname": "ZerowatchTargetNeverUp",
    "severity": "warning",
    "instance": "10.0.0.7:9464",
    **LABELS,
    "node": "node-7",
    "rank": "7",
}
MISSING = {"alertname": "ZerowatchRanksMissing", "severity": "warning", **LABELS}
ELSEWHERE = {"instance": "10.0.0.9:9464", "node": "node-9"}
ACTIVE, ACTIVITY = "zerowatch_run_active", "zerowatch_last_activity_timestamp_seconds"
WORLD_SIZE = "zerowatch_world_size"
# The usual intervals between two scrapes, in seconds.
SCRAPE_INTERVALS = (5.0, 15.0, 30.0, 60.0)


def steps(*stretches: Stretch) -> Series:
    """A run whose steps and activity start and stop together."""
    minutes = sum(stretch[0] for stretch in stretches)
    pace = counter(*stretches)
    return training(minutes) | of_both("zerowatch_steps_total", pace) | of_both(ACTIVITY, pace)


def stuck(minutes: float, steps_taken: float | None = 0) -> Series:
    """Two ranks that are ready and do nothing."""
    return (
        training(minutes)
        | of_both("zerowatch_steps_total", gauge((minutes, steps_taken)))
        | of_both(ACTIVITY, gauge((minutes, 1000)))
    )


def vanishing(*stretches: Stretch) -> Series:
    """Rank 1 is no target any more where its value is GONE; rank 0 trains on."""
    minutes = sum(stretch[0] for stretch in stretches)
    up = of_rank(1, "up", gauge(*stretches))
    return training_rank(0, (minutes, 1)) | training_rank(1, *stretches) | up


def renamed(run: str, series: Series) -> Series:
    """Return the same series of another run."""
    return {name.replace("night-7", run): values for name, values in series.items()}


def of_cluster(job: str, series: Series) -> Series:
    """Return the same series of a run that another cluster scrapes under this job."""
    return {name.replace('job="zerowatch"', f'job="{job}"'): series[name] for name in series}


def normal_ends(every: float) -> Case:
    """Return six runs that end in good order. In some, ranks miss the last scrape."""
    last = every / 60  # minutes for which a value is read once
    ended, missed = ((10, 1), (last, 0), (20, GONE)), ((10, 1), (20, GONE))
    histories = {
        # A rank serves its last values for 75 s, whoever reads them.
        "all-export-their-end": (((10, 1), (75 / 60, 0), (20, GONE)),) * 2,
        "only-rank-0-does": (ended, missed),
        "only-rank-1-does": (missed, ended),
        "rank-1-ends-later": (ended, ((10 + last, 1), (last, 0), (20, GONE))),
        "rank-1-ends-later-and-does-not-export-it": (ended, ((10 + last, 1), (20, GONE))),
        # At 10:05 with scrapes each 5 s: gone at 10:10, so no evaluation finds the value.
        "all-ends-are-read-once-between-evaluations": (((10 + last, 1), (last, 0), (20, GONE)),)
        * 2,
    }
    series: Series = {}
    for run, ranks in histories.items():
        for rank, stretches in enumerate(ranks):
            series |= renamed(run, training_rank(rank, *stretches, every=every))
    return Case(
        title=f"Does not fire at normal ends with scrapes each {every:g} s",
        series=series,
        until="25m",
        every=every,
    )


def resumed_elsewhere(*later: Stretch) -> Series:
    """A run that ended in good order after 10 minutes, and began again on other hosts at 20."""
    series: Series = {}
    for rank in (0, 1):
        moved = {"instance": f"10.0.1.{rank}:9464", "node": f"node-1{rank}"}
        series |= training_rank(rank, (10, 1), (0.25, 0), (10, GONE))
        series |= of_rank(rank, ACTIVE, gauge((20, GONE), *later), **moved)
        series |= of_rank(rank, "zerowatch_steps_total", counter((20, GONE), *later), **moved)
        series |= of_rank(rank, ACTIVITY, counter((20, GONE), *later), **moved)
    return series


RESUMED_AT_ONCE = ((10, 1), (0.25, 0), (0.75, GONE), (1.5, 1), (22.5, GONE), (5, 1))
NORMAL_ENDS = tuple(map(normal_ends, SCRAPE_INTERVALS))
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
            description="No rank has made progress for ten minutes. Since its last start, the run "
            "has completed 294 steps. Read hang-rank-*.txt in the run folder: the first line names "
            "the missing ranks, and where they are missing.",
        ),
    ),
    Case(
        title="Does not fire during an evaluation of 15 minutes",
        near="ZerowatchTrainingStalled",
        series=training(25) | of_both("zerowatch_steps_total", counter((5, 1), (15, 0), (5, 1))),
        until="25m",
    ),
    Case(
        title="Does not fire at one step a minute",
        near="ZerowatchTrainingStalled",
        series=steps(*((0.9, 0), (0.1, 1)) * 20),
        until="20m",
    ),
    Case(
        title="Does not fire on a pause of nine minutes",
        near="ZerowatchTrainingStalled",
        series=steps((5, 1), (9, 0), (5, 1)),
        until="19m",
    ),
    # The end of a run.
    *NORMAL_ENDS,
    Case(
        title="Fires if a run dies, and resolves when it answers again",
        series=training_rank(0, (10, 1), (40, GONE), (5, 1))
        | training_rank(1, (10, 1), (40, GONE), (5, 1)),
        alert=DIED,
        fires_at="11m30s",
        recovers_at="50m15s",
        annotations=annotations_of(
            "ZerowatchRunDied",
            dashboard="zerowatch-overview",
            summary="Training night-7 has died",
            description="No rank of the run answers, and none ended in good order. A rank was last "
            "seen training at 1970-01-01 00:09:55 +0000 UTC. Hosts of its ranks: node-0, node-1. "
            "The end of the launcher's output names the rank that failed first. If neither its "
            "launcher nor a scheduler starts it again, restart the run from its last checkpoint. "
            "The alert ends when the run answers again, or after six hours.",
        ),
    ),
    Case(
        title="Fires if a run dies and its targets vanish, and resolves when it is back",
        series=resumed_elsewhere((10, GONE), (20, 1))
        | {
            name: values
            for rank in (0, 1)
            for name, values in training_rank(rank, (10, 1), (40, GONE)).items()
            if not name.startswith("up")
        },
        alert=DIED,
        fires_at="11m30s",
        recovers_at="30m15s",
    ),
    Case(
        title="Fires if a run ended in good order, was resumed elsewhere and then died",
        series=resumed_elsewhere((10, 1), (10, GONE), (5, 1)),
        alert=DIED,
        fires_at="31m30s",
        recovers_at="40m15s",
    ),
    Case(
        title="Fires if a run ended in good order, was resumed at once and died within two minutes",
        series=training_rank(0, *RESUMED_AT_ONCE) | training_rank(1, *RESUMED_AT_ONCE),
        alert=DIED,
        fires_at="14m",
        recovers_at="35m",
    ),
    Case(
        title="Does not fire if a run was resumed elsewhere and ended in good order",
        near="ZerowatchRunDied",
        series=resumed_elsewhere((5, 1), (0.25, 0), (20, GONE)),
        until="45m",
    ),
    Case(
        title="Fires if all ranks export that they ended by an exception",
        series=training_rank(0, (10, 1), (1, 0), (5, GONE), (4, 1))
        | training_rank(1, (10, 1), (1, 0), (5, GONE), (4, 1))
        | of_both("zerowatch_run_end_info", gauge((10, GONE), (1, 1)), reason="exception"),
        alert=DIED,
        fires_at="11m30s",
        recovers_at="16m15s",
    ),
    Case(
        title="Fires within three minutes with scrapes each minute",
        series=training_rank(0, (10, 1), (6, GONE), (4, 1), every=60)
        | training_rank(1, (10, 1), (6, GONE), (4, 1), every=60),
        alert=DIED,
        fires_at="11m15s",
        recovers_at="16m",
        every=60,
    ),
    Case(
        title="Does not fire if one scrape in a minute fails on the only rank",
        near="ZerowatchRunDied",
        series=training_rank(0, (10, 1), (1, GONE), (10, 1), every=60)
        | of_rank(0, WORLD_SIZE, gauge((21, 1), every=60)),
        until="21m",
        every=60,
    ),
    Case(
        title="Does not fire if a whole run restarts within a minute",
        near="ZerowatchRunDied",
        series=training_rank(0, (10, 1), (1, GONE), (10, 1))
        | training_rank(1, (10, 1), (1, GONE), (10, 1)),
        until="21m",
    ),
    # A rank of several.
    Case(
        title="Fires if a rank is killed and resolves when it answers again",
        series=training_rank(0, (15, 1)) | training_rank(1, (5, 1), (5, GONE), (5, 1)),
        alert=VANISHED,
        fires_at="6m30s",
        recovers_at="10m15s",
        annotations=annotations_of(
            "ZerowatchRankVanished",
            dashboard="zerowatch-overview",
            summary="Rank 1 of training night-7 has vanished from node-1",
            description="Rank 1 on node-1 (10.0.0.1:9464) no longer answers, but other ranks of "
            "the run do. It was last seen training at 1970-01-01 00:04:54 +0000 UTC. Check whether "
            "its process is alive, and read the kernel log of its host.",
        ),
    ),
    Case(
        title="Fires if a rank is no target any more",
        series=vanishing((5, 1), (25, GONE), (5, 1)),
        alert=VANISHED,
        fires_at="6m30s",
        recovers_at="30m15s",
    ),
    Case(
        title="Does not fire if a rank restarts within a minute",
        near="ZerowatchRankVanished",
        series=training_rank(0, (10, 1)) | training_rank(1, (5, 1), (0.8, GONE), (4.2, 1)),
        until="10m",
    ),
    Case(
        title="Does not fire if a rank comes back on another port",
        near="ZerowatchRankVanished",
        series=training_rank(0, (15, 1))
        | training_rank(1, (5, 1), (10, GONE))
        | of_rank(1, "up", gauge((5.5, GONE), (9.5, 1)), instance="10.0.0.1:9564")
        | of_rank(1, ACTIVE, gauge((5.5, GONE), (9.5, 1)), instance="10.0.0.1:9564"),
        until="15m",
    ),
    Case(
        title="Does not fire if a killed rank came back on another host and ended there",
        near="ZerowatchRankVanished",
        series=training_rank(0, (10, 1), (0.25, 0), (14.75, GONE))
        | of_rank(1, ACTIVE, gauge((5, 1), (20, GONE)))
        | of_rank(1, "up", gauge((5.5, 1), (19.5, GONE)))  # it is no longer a target
        | of_rank(1, ACTIVE, gauge((5.5, GONE), (4.5, 1), (0.25, 0)), **ELSEWHERE)
        | of_rank(1, "up", gauge((5.5, GONE), (4.75, 1), (14.75, 0)), **ELSEWHERE),
        until="25m",
    ),
    Case(
        title="Does not fire if a run continues with fewer ranks",
        near="ZerowatchRankVanished",
        series=training_rank(0, (5, 1), (0.5, GONE), (14.5, 1))
        | training_rank(1, (5, 1), (15, GONE))
        | of_rank(0, WORLD_SIZE, gauge((5, 2), (0.5, GONE), (14.5, 1))),
        until="20m",
    ),
    Case(
        title="Fires although the size of the run is not known",
        series=training_rank(0, (15, 1))
        | training_rank(1, (5, 1), (5, GONE), (5, 1))
        | of_both(WORLD_SIZE, gauge((15, GONE))),
        alert=VANISHED,
        fires_at="6m30s",
        recovers_at="10m15s",
    ),
    Case(
        title="Fires if a rank dies ten minutes after another has ended in good order",
        series=training_rank(0, (30, 1))
        | training_rank(1, (20, 1), (5, GONE), (5, 1))
        | training_rank(2, (10, 1), (0.25, 0), (19, GONE))
        | of_both(WORLD_SIZE, gauge((30, 3))),
        alert=VANISHED,
        fires_at="21m30s",
        recovers_at="25m15s",
    ),
    # Ranks that hang or never begin.
    Case(
        title="Fires at the next evaluation if a rank hangs, for as long as it does",
        series=training(25)
        | of_rank(1, "zerowatch_hang_active", gauge((5, 0), (15, 1), (5, 0)))
        | of_rank(1, "zerowatch_hang_awaited_rank", gauge((5, GONE), (15, 0), (5, GONE))),
        alert=HUNG,
        fires_at="5m15s",
        recovers_at="21m15s",
        annotations=annotations_of(
            "ZerowatchRankHung",
            dashboard="zerowatch-overview",
            summary="Rank 1 of training night-7 hangs on node-1",
            description="Rank 1 on node-1 makes no progress, and usually all other ranks wait with "
            "it. It waits for rank 0 on node-0. The first line of hang-rank-*.txt in the run "
            "folder names the ranks that are missing, and the collective. The host to look at is "
            "that of a missing rank.",
        ),
    ),
    Case(
        title="Fires if a run has no first step",
        series=stuck(40)
        | of_both("zerowatch_steps_total", counter((30, 0), (10, 1)))
        | of_both(ACTIVITY, counter((30, 0), (10, 1))),
        alert=NO_FIRST_STEP,
        fires_at="13m",
        recovers_at="30m15s",
        annotations=annotations_of(
            "ZerowatchNoFirstStep",
            dashboard="zerowatch-overview",
            summary="Training night-7 does not begin",
            description="2 ranks are ready, but the run has completed no step, and no rank has "
            "made progress for more than 15 minutes. Usual causes are a process group that does "
            "not form, a first batch that does not arrive, and a long compilation.",
        ),
    ),
    Case(
        title="Fires if a run has no first step and its counter of steps is absent",
        series=stuck(40, steps_taken=GONE),
        alert=NO_FIRST_STEP,
        fires_at="13m",
        recovers_at="45m",
    ),
    Case(
        title="Does not fire if a run evaluates for an hour before its first step",
        near="ZerowatchNoFirstStep",
        series=training(30) | of_both("zerowatch_steps_total", gauge((30, 0))),
        until="30m",
    ),
    Case(
        title="Does not fire if the first step takes ten minutes",
        near="ZerowatchNoFirstStep",
        series=steps((10, 0), (10, 1)),
        until="20m",
    ),
    Case(
        title="Fires if one of two runs of the same name dies, which have a job for each cluster",
        series=training(20)
        | of_cluster("zerowatch-us", training_rank(0, (5, 1), (10, GONE), (5, 1)))
        | of_cluster("zerowatch-us", training_rank(1, (5, 1), (10, GONE), (5, 1))),
        alert={**DIED, "job": "zerowatch-us"},
        fires_at="6m30s",
        recovers_at="15m15s",
    ),
    Case(
        title="Fires on a target that never answers",
        series=training(20) | answers((12, GONE), (8, 1), rank=7),
        alert=NEVER_UP,
        fires_at="5m",
        recovers_at="12m15s",
    ),
    Case(
        title="Does not fire on a target of another program that has a label `run`",
        near="ZerowatchTargetNeverUp",
        series={'up{job="kubernetes-pods", instance="10.0.0.7:8080", run="nginx"}': gauge((8, 0))},
        until="8m",
    ),
    Case(
        title="Does not fire on a target of an old run",
        near="ZerowatchTargetNeverUp",
        series=training(40) | answers((400, GONE), rank=7),
        until="4m45s",
    ),
    Case(
        title="Does not fire on a target of an old run five hours after Prometheus was down",
        near="ZerowatchTargetNeverUp",
        series=of_rank(7, "up", gauge((30, 0), (30, GONE), (330, 0), every=60)),
        since="306m",
        until="390m",
        every=60,
    ),
    Case(
        title="Fires if fewer ranks answer than were started",
        series=vanishing((10, GONE), (10, 1)),
        alert=MISSING,
        fires_at="5m",
        recovers_at="10m15s",
    ),
)
