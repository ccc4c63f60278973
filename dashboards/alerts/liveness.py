"""Alerts on runs and ranks that died, hang, never began or keep restarting."""

from __future__ import annotations

from ...metrics.catalog import communication as comm
from ...metrics.catalog import training
from ...metrics.thresholds import RESTARTS_HIGH
from .. import recording_rules as recorded
from ..limits import above
from ..promql import IDENTITY, by, earlier, select
from ..timing import HOUR, MINUTE, Timing
from .alert import NODE, NUMBER, RANK, RUN, Alert, InhibitRule
from .communication import COMM_BOTTLENECK, COMM_RATIO_ROSE, LINK_SLOW, STRAGGLER_RANK
from .guards import while_training
from .training import DATA_BOUND, LOW_DEVICE_UTILIZATION, MFU_DROPPED, OVERVIEW

RANKS_MISSING = "ZerowatchRanksMissing"
TARGET_NEVER_UP = "ZerowatchTargetNeverUp"
TRAINING_STALLED = "ZerowatchTrainingStalled"
# Hosts that an alert on a whole run names.
HOSTS_NAMED = 4
# How long a run or rank must be gone. With a scrape interval of a minute, one failed scrape raises
# no alert, and an alert is sent within three minutes: 60 s until the next scrape, 10 s for its
# timeout, 15 s until the next evaluation, these 75 s, and 20 s that Alertmanager waits.
GONE_SECONDS = 75.0
# The ranks of a run end within this time of each other: a rank serves its last values for up to
# 75 s, and the longest usual scrape interval is a minute.
ENDS_APART_SECONDS = 150.0
# Alerts on a run that is slow. If it stands still, they say nothing more.
OF_SLOW_RUNS = (
    COMM_BOTTLENECK,
    COMM_RATIO_ROSE,
    DATA_BOUND,
    LINK_SLOW,
    LOW_DEVICE_UTILIZATION,
    MFU_DROPPED,
    STRAGGLER_RANK,
)
_ACTIVE = f"{select(training.RUN_ACTIVE)} == 1"


def liveness_alerts(timing: Timing) -> tuple[Alert, ...]:
    """Return the alerts; `timing` sets their PromQL ranges."""
    return (
        _run_died(timing),
        _rank_vanished(timing),
        _rank_hung(timing),
        _training_stalled(timing),
        _no_first_step(timing),
        _target_never_up(timing),
        _ranks_missing(timing),
        _restarting(timing),
    )


def _last(rule: recorded.RecordingRule, time_range: str) -> str:
    return f"max_over_time({rule.select()}[{time_range}])"


def _hosts(timing: Timing) -> str:
    """Return a template that lists the hosts on which ranks of the run were last training."""
    matchers = ", ".join(f"{label}=%q" for label in IDENTITY)
    labels = " ".join(f"$labels.{label}" for label in IDENTITY)
    seen = f"max_over_time({recorded.RANK_ACTIVE_TIME.select(matchers)}[{timing.history}])"
    query = f"`topk({HOSTS_NAMED}, max by (node) ({seen}))`"
    return (
        f"{{{{ range $place, $host := printf {query} {labels} | query | sortByLabel `node` }}}}"
        "{{ if $place }}, {{ end }}{{ $host.Labels.node }}{{ end }}"
    )


def _run_died(timing: Timing) -> Alert:
    # One rank that ended in good order is enough: Prometheus may not have read the end of others.
    # Earlier ends of the run do not count, because a run may be resumed under its id: neither those
    # long before its last activity, nor those of ranks that have been active since.
    last_active = by("max", _last(recorded.RUN_ACTIVE_TIME, timing.history))
    of_ranks = (recorded.RANK_ENDED_TIME, recorded.RANK_ACTIVE_TIME)
    ended, active = (
        f"max by (job, run, rank) ({_last(rule, timing.history)})" for rule in of_ranks
    )
    last_ended = by("max", f"{ended} > {active}")
    apart = timing.seconds(ENDS_APART_SECONDS)
    return Alert(
        name="ZerowatchRunDied",
        component="training",
        severity="critical",
        expression=(
            f"{last_active}\nunless on (job, run) {_ACTIVE}\n"
            f"unless on (job, run) {last_ended} > {last_active} - {apart}"
        ),
        for_seconds=GONE_SECONDS,
        keep_firing_seconds=0,  # an answer proves that the run is alive
        summary=f"Training {RUN} has died",
        description=(
            "No rank of the run answers, and none ended in good order. A rank was last seen "
            "training at {{ $value | humanizeTimestamp }}. Hosts of its ranks: "
            f"{_hosts(timing)}. The end of the launcher's output names the rank that failed "
            "first. If neither its launcher nor a scheduler starts it again, restart the run from "
            "its last checkpoint. The alert ends when the run answers again, or after six hours."
        ),
        dashboard=OVERVIEW,
        inhibits=InhibitRule(alerts=(TRAINING_STALLED,), less_urgent=True),
    )


def _rank_vanished(timing: Timing) -> Alert:
    rank = "on (job, run, rank)"
    last_active = _last(recorded.RANK_ACTIVE_TIME, timing.hour)
    # A rank may have moved to another port or host; only its last address counts.
    newest = f"max by (job, run, rank) ({last_active})"
    ended = f"max by (job, run, rank) ({_last(recorded.RANK_ENDED_TIME, timing.hour)})"
    run_ends = by("max", _last(recorded.RANK_ENDED_TIME, timing.duration(ENDS_APART_SECONDS)))
    seen = by("count", f"count by (job, run, rank) ({select(training.RUN_ACTIVE)})")
    return Alert(
        name="ZerowatchRankVanished",
        component="training",
        severity="critical",
        expression=(
            f"{last_active} == {rank} group_left () {newest}\n"
            f"unless {rank} {select(training.RUN_ACTIVE)}\n"
            f"unless {rank} {ended} > {newest}\n"
            f"unless on (job, run) {run_ends}\n"
            # An elastic run may continue with fewer ranks.
            f"unless on (job, run) {seen} >= {by('max', select(training.WORLD_SIZE))}\n"
            f"and on (job, run) {_ACTIVE}"
        ),
        for_seconds=GONE_SECONDS,
        keep_firing_seconds=0,  # an answer proves that the rank is up
        summary=f"Rank {RANK} of training {RUN} has vanished from {NODE}",
        description=(
            f"Rank {RANK} on {NODE} ({{{{ $labels.instance }}}}) no longer answers, but other "
            "ranks of the run do. It was last seen training at {{ $value | humanizeTimestamp }}. "
            "Check whether its process is alive, and read the kernel log of its host."
        ),
        dashboard=OVERVIEW,
        inhibits=InhibitRule(alerts=(TRAINING_STALLED,), less_urgent=True),
    )


def _awaited(timing: Timing) -> str:
    """Return a template that names the rank for which a rank that hangs waits, and its host."""
    of_run = ", ".join(f"{label}=%q" for label in (*IDENTITY, "rank"))
    labels = " ".join(f"$labels.{label}" for label in IDENTITY)
    awaited = f"`{select(comm.HANG_AWAITED_RANK, of_run)}` {labels} $labels.rank"
    host = f"`last_over_time({select(training.RUN_ACTIVE, of_run)}[{timing.hour}])` {labels} $rank"
    return (
        f"{{{{ with printf {awaited} | query }}}}"
        '{{ $rank := . | first | value | printf "%.0f" }} It waits for rank {{ $rank }}'
        f"{{{{ with printf {host} | query }}}} on {{{{ . | first | label `node` }}}}{{{{ end }}}}."
        "{{ end }}"
    )


def _rank_hung(timing: Timing) -> Alert:
    hangs = f"{by('max', select(comm.HANG_ACTIVE), 'rank')} == 1"
    return Alert(
        name="ZerowatchRankHung",
        component="training",
        severity="critical",
        expression=while_training(hangs, "rank"),
        for_seconds=0,
        keep_firing_seconds=MINUTE,  # longer than a failed scrape
        summary=f"Rank {RANK} of training {RUN} hangs on {NODE}",
        description=(
            f"Rank {RANK} on {NODE} makes no progress, and usually all other ranks wait with it."
            f"{_awaited(timing)} The first line of hang-rank-*.txt in the run folder names the "
            "ranks that are missing, and the collective. The host to look at is that of a missing "
            "rank."
        ),
        dashboard=OVERVIEW,
        inhibits=InhibitRule(alerts=(TRAINING_STALLED, *OF_SLOW_RUNS)),
    )


def _activity(timing: Timing) -> str:
    # During an evaluation there are no steps either, but the time of the last activity changes.
    # Only timestamps of the same host are subtracted, so that clocks may differ between hosts.
    return by("max", f"delta({select(training.LAST_ACTIVITY_TIMESTAMP)}[{timing.short}])")


def _training_stalled(timing: Timing) -> Alert:
    total = by("max", select(training.STEPS))
    steps = by("max", f"changes({select(training.STEPS)}[{timing.short}])")
    stalled = (
        f"{total} > 0\nand on (job, run) {steps} == 0\nand on (job, run) {_activity(timing)} < 1"
    )
    return Alert(
        name=TRAINING_STALLED,
        component="training",
        severity="critical",
        expression=while_training(stalled),
        for_seconds=5 * MINUTE,
        keep_firing_seconds=0,  # a new step proves that the stall is over
        summary=f"Training {RUN} has stalled",
        description=(
            "No rank has made progress for ten minutes. Since its last start, the run has "
            f"completed {NUMBER} steps. Read hang-rank-*.txt in the run folder: the first line "
            "names the missing ranks, and where they are missing."
        ),
        dashboard=OVERVIEW,
        inhibits=InhibitRule(alerts=OF_SLOW_RUNS),
    )


def _no_first_step(timing: Timing) -> Alert:
    active = by("count", _ACTIVE)
    stuck = (
        f"{active}\nunless on (job, run) {by('max', select(training.STEPS))} > 0\n"
        f"unless on (job, run) {_activity(timing)} >= 1"
    )
    return Alert(
        name="ZerowatchNoFirstStep",
        component="training",
        severity="critical",
        expression=while_training(stuck),
        for_seconds=13 * MINUTE,  # after five minutes without activity: less than 20 in all
        keep_firing_seconds=0,
        summary=f"Training {RUN} does not begin",
        description=(
            f"{NUMBER} ranks are ready, but the run has completed no step, and no rank has made "
            "progress for more than 15 minutes. Usual causes are a process group that does not "
            "form, a first batch that does not arrive, and a long compilation."
        ),
        dashboard=OVERVIEW,
    )


def _target_never_up(timing: Timing) -> Alert:
    # Targets of other programs may have a label `run` as well.
    target = 'up{run!="", rank!=""}'
    # Not a target that has been down for hours: discovery may list the ranks of old runs.
    active = f"last_over_time({select(training.RUN_ACTIVE)}[{timing.history}])"
    # Prometheus may have been down five hours ago.
    listed = earlier(target, timing.duration(5 * HOUR), timing.history)
    ended = by("max", _last(recorded.RANK_ENDED_TIME, timing.history))
    return Alert(
        name=TARGET_NEVER_UP,
        component="training",
        severity="warning",
        expression=(
            f"{target} == 0\n"
            f"unless on (job, instance, run, rank) {active}\n"
            f"unless on (job, instance, run, rank) {listed}\n"
            "unless on (job, run, rank) up == 1\n"
            f"unless on (job, run) ({ended} unless on (job, run) {_ACTIVE})"
        ),
        for_seconds=5 * MINUTE,
        keep_firing_seconds=0,
        summary=f"Prometheus cannot reach rank {RANK} of training {RUN} on {NODE}",
        description=(
            "The rank is listed at {{ $labels.instance }}, but has never answered there. The rank "
            "may train, but nothing about it is known and no alert is raised for it. Check "
            "firewalls, the address that the rank advertises, and whether its process is alive."
        ),
        dashboard="zerowatch-overhead",
    )


def _ranks_missing(timing: Timing) -> Alert:
    # A rank that was seen within the hour has vanished, which is another alert.
    last_active = _last(recorded.RANK_ACTIVE_TIME, timing.hour)
    seen = by("count", f"count by (job, run, rank) ({last_active})")
    started = by("max", select(training.WORLD_SIZE))
    return Alert(
        name=RANKS_MISSING,
        component="training",
        severity="warning",
        expression=while_training(f"{seen} < {started}"),
        for_seconds=5 * MINUTE,
        keep_firing_seconds=0,
        summary=f"Some ranks of training {RUN} are not monitored",
        description=(
            f"Prometheus has read {NUMBER} ranks in the last hour, fewer than the run was started "
            "with. Figures of the run leave out the others, and alerts on them do not fire. "
            "Compare the targets in Prometheus with the ranks of the job."
        ),
        dashboard="zerowatch-overhead",
    )


def _restarting(timing: Timing) -> Alert:
    # changes() of one series would miss restarts, because a restarted rank may use another port.
    # Processes are counted, because restarts_total is that of a TrainingRun and of its launcher
    # only, and a script that makes several watches has as many attempts.
    started = by("max", 'process_start_time_seconds{rank="0"}')
    restarts = f"changes(({started})[{timing.long}:{timing.evaluation}])"
    return Alert(
        name="ZerowatchRestarting",
        component="training",
        severity="critical",
        expression=while_training(above(restarts, RESTARTS_HIGH, or_equal=True)),
        for_seconds=0,
        keep_firing_seconds=5 * MINUTE,
        summary=f"Training {RUN} keeps restarting",
        description=(
            f"The run restarted {NUMBER} times within half an hour. Each attempt may get no "
            "further than the one before. Read the end of the log of the rank that ended first."
        ),
        dashboard=OVERVIEW,
    )
