"""The dashboard Runs, the home page: all runs with their state, progress and alerts."""

from __future__ import annotations

from .. import recording_rules as recorded
from ..grafana.dashboard import Dashboard, Row
from ..grafana.links import JOB_HEADING, RUN_HEADING
from ..grafana.panels import (
    ANY_IS_BAD,
    COUNT,
    HOURS_AND_MINUTES,
    MOMENT,
    PLAIN,
    PLAIN_TEXT,
    RATIO,
    SECONDS,
    Column,
    Query,
    Stat,
    StateTimeline,
    Table,
    Text,
)
from ..promql import by
from ..run_status import FIRST_END, RunStatus
from .queries import JOBS, last_goodput, latest, state_of
from .shared_panels import STATES, alert_table, sized

FIRING = f'ALERTS{{{", ".join(JOBS)}, alertstate="firing", run!=""}}'
STATE = state_of(*JOBS)


def number_of_runs(condition: str) -> str:
    """Return the number of runs whose state meets a condition such as "< 10"."""
    return f"count(({STATE}) {condition}) or vector(0)"


FLEET = sized(
    4,
    4,
    Stat(
        title="Runs that train",
        description="Number of runs with a rank that trains now. The table below lists them.",
        queries=(Query(number_of_runs(f"< {FIRST_END:d}"), "runs", shape="now"),),
        unit=PLAIN,
        thresholds=PLAIN_TEXT,
        plain=True,
    ),
    Stat(
        title="Stalled or hanging",
        description="Number of runs that are alive and make no progress. It should be 0: see the "
        "state in the table below, and hang-rank-*.txt in the run folder.",
        queries=(
            Query(
                f"count(({STATE}) == {RunStatus.STALLED:d} or ({STATE}) == {RunStatus.HANGING:d})"
                " or vector(0)",
                "runs",
                shape="now",
            ),
        ),
        unit=PLAIN,
        thresholds=ANY_IS_BAD,
        color="background",
        plain=True,
    ),
    Stat(
        title="Vanished",
        description="Number of runs in the time range whose ranks stopped to answer while they "
        "were training. See the end of their logs, and whether their nodes are up.",
        queries=(Query(number_of_runs(f"== {RunStatus.VANISHED:d}"), "runs", shape="now"),),
        unit=PLAIN,
        thresholds=ANY_IS_BAD,
        color="background",
        plain=True,
    ),
    Stat(
        title="Alerts firing",
        description="Number of alerts of all runs that fire now. The table below names them.",
        queries=(Query(f"count({FIRING}) or vector(0)", "alerts", shape="now"),),
        unit=PLAIN,
        thresholds=ANY_IS_BAD,
        color="background",
        plain=True,
    ),
    Stat(
        title="Ranks training",
        description="Number of ranks of all runs that train now.",
        queries=(
            Query(f"sum({recorded.ACTIVE_RANKS.select(*JOBS)}) or vector(0)", "ranks", shape="now"),
        ),
        unit=PLAIN,
        thresholds=PLAIN_TEXT,
        plain=True,
    ),
    Stat(
        title="Samples per second",
        description="Samples per second of all runs together, without those whose ranks share "
        "samples.",
        queries=(
            Query(f"sum({recorded.SAMPLES_RATE.select(*JOBS)}) or vector(0)", "rate", shape="now"),
        ),
        unit=COUNT,
        thresholds=PLAIN_TEXT,
        plain=True,
    ),
)

SEEN = f"max_over_time(timestamp({recorded.RUN_STATE.select(*JOBS)})[$__range:15s])"

ALL_RUNS = (
    Table(
        title="Runs",
        description="All runs with data in the time range, the newest first; figures of a run that "
        "has ended are its last ones. A click on a run opens its Overview. To see older runs, "
        "choose a longer time range at the top.",
        labels={"run": RUN_HEADING, "job": JOB_HEADING},
        columns=(
            Column(title="State", expression=STATE, unit=PLAIN, named=STATES),
            Column(
                title="Alerts",
                expression=by("count", FIRING),
                unit=PLAIN,
                thresholds=ANY_IS_BAD,
            ),
            Column(
                title="Ranks",
                expression=by("max", recorded.ACTIVE_RANKS.select(*JOBS)),
                unit=PLAIN,
            ),
            Column(title="World", expression=latest(recorded.WORLD_SIZE, *JOBS), unit=PLAIN),
            Column(title="Step", expression=latest(recorded.STEPS_DONE, *JOBS), unit=PLAIN),
            Column(
                title="Step time",
                expression=latest(recorded.STEP_QUANTILE_MEDIAN, *JOBS, 'quantile="0.5"'),
                unit=SECONDS,
            ),
            Column(
                title="Samples/s",
                expression=latest(recorded.SAMPLES_RATE, *JOBS),
                unit=COUNT,
            ),
            Column(
                title="MFU",
                expression=latest(recorded.MFU, *JOBS),
                unit=RATIO,
                decimals=1,
            ),
            Column(
                title="Goodput",
                expression=last_goodput(*JOBS),
                unit=RATIO,
                decimals=0,
            ),
            Column(
                title="Exposed",
                expression=latest(recorded.EXPOSED_RATIO, *JOBS),
                unit=RATIO,
                decimals=1,
            ),
            Column(title="Loss", expression=latest(recorded.LOSS, *JOBS), unit=PLAIN, decimals=3),
            Column(
                title="Age",
                expression=f"{by('max', SEEN)} - on (job, run) {latest(recorded.RUN_START, *JOBS)}",
                unit=HOURS_AND_MINUTES,
            ),
            Column(
                title="Started",
                expression=f"1000 * {latest(recorded.RUN_START, *JOBS)}",
                unit=MOMENT,
            ),
            Column(title="Seen", expression=f"1000 * {by('max', SEEN)}", unit=MOMENT),
        ),
        sort_by="Started",
        widths={
            "State": 115,
            "Alerts": 65,
            "Ranks": 65,
            "World": 65,
            "Step": 75,
            "Step time": 90,
            "Samples/s": 90,
            "MFU": 70,
            "Goodput": 80,
            "Exposed": 80,
            "Loss": 75,
            "Age": 85,
            "Started": 155,
            "Seen": 155,
        },
        width=24,
        height=10,
    ),
    alert_table(*JOBS, 'run!=""', width=24, height=7),
    StateTimeline(
        title="States over time",
        description="The state of each run over the time range. Gaps are times at which no rank "
        "answered.",
        queries=(Query(recorded.RUN_STATE.select(*JOBS), "{{run}}"),),
        unit=PLAIN,
        named=STATES,
        width=24,
        height=8,
    ),
    Text(
        title="How to read this page",
        description="Explains the states of a run.",
        content="**training**, **starting** (no step yet), **stalled** (no progress for five "
        "minutes), **hanging** (a rank reports that it hangs). After the end: **completed**, "
        "**interrupted**, **exception**, **out of memory**, **hang abort** (the run ended itself "
        "because it hung), **peer failed** (another rank ended first), **ended** (no reason was "
        "read). **vanished**: the ranks stopped to answer while they were training. **Age** is "
        "the time from the start of the first attempt to the last data. The dashboard Compare "
        "shows two runs side by side.",
        width=24,
        height=4,
    ),
)

DASHBOARD = Dashboard(
    name="runs",
    title="Runs",
    description="Which runs are there, how are they, and which need attention?",
    rows=(Row("All runs together", FLEET), Row("Each run", ALL_RUNS)),
    span="24h",
    about="runs",
    refresh="30s",
)
