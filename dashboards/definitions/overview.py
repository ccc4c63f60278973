"""The dashboard Overview: health, bottlenecks, progress and slowest ranks of a run."""

from __future__ import annotations

from ...metrics.catalog import training as steps
from ...metrics.thresholds import (
    DATA_RATIO_HIGH,
    DEVICE_UTILIZATION_LOW,
    EXPOSED_COMM_RATIO_HIGH,
    OOM_RISK_CRITICAL,
    OOM_RISK_HIGH,
    REPLAY_RATIO_HIGH,
    STRAGGLER_SCORE_HIGH,
)
from .. import recording_rules as recorded
from ..alerts.communication import steady
from ..grafana.dashboard import Dashboard, Row, uid_of
from ..grafana.panels import (
    ANY_IS_BAD,
    BAD,
    COUNT,
    GOOD,
    PLAIN,
    PLAIN_TEXT,
    RATIO,
    SECONDS,
    WARNING,
    BarGauge,
    Column,
    Query,
    Stat,
    Step,
    Table,
    Text,
    TimeSeries,
    above,
    below,
)
from ..promql import ON_GPU, by
from ..timing import Timing
from .queries import RUN, of_ranks, of_run, rate_of_ranks, worst
from .shared_panels import PHASE_COLORS, TABLE_ROWS, rank_table, sized, step_seconds

FIRING = f'ALERTS{{{", ".join(RUN)}, alertstate="firing"}}'
CLOSE_TO_LIMIT = (Step(GOOD), Step(WARNING, 0.75), Step(BAD, 1))

HEALTH = sized(
    4,
    5,
    Stat(
        title="Ranks training",
        description="Number of ranks that are training; 0 after the run ends. If it is lower than "
        "the number of ranks of the run, see the alerts below, then the log of the missing rank.",
        # vector(0): a killed run exports nothing, and the panel should then show 0.
        queries=(Query(f"sum({of_run(recorded.ACTIVE_RANKS)}) or vector(0)", "ranks"),),
        unit=PLAIN,
        thresholds=PLAIN_TEXT,
    ),
    Stat(
        title="Alerts firing",
        description="Number of alerts of this run that fire now. It should be 0. The table of "
        "alerts below names them, and each alert links to its page in the runbook.",
        queries=(Query(f"count({FIRING}) or vector(0)", "alerts", shape="now"),),
        unit=PLAIN,
        thresholds=ANY_IS_BAD,
        color="background",
        plain=True,
    ),
    Stat(
        title="Time since the last step",
        description="Time since any rank completed a step. During training it is at most about the "
        "time of one step. If it grows, read hang-rank-*.txt in the run folder: it shows which "
        "rank waits for which.",
        queries=(
            Query(f"time() - {by('max', of_ranks(steps.LAST_STEP_TIMESTAMP))}", "age", shape="now"),
        ),
        unit=SECONDS,
        thresholds=PLAIN_TEXT,
        plain=True,
    ),
    Stat(
        title="Step time",
        description="Mean time of a step over the last five minutes, without evaluation and "
        "checkpoints. If it rises, the panel Step time by phase below shows which phase takes "
        "longer.",
        queries=(Query(of_run(recorded.STEP_DURATION), "step"),),
        unit=SECONDS,
        thresholds=PLAIN_TEXT,
        dashboard=uid_of("step_anatomy"),
    ),
    Stat(
        title="Samples per second",
        description="Samples per second of the chosen ranks together. Compare this figure before "
        "and after you change something.",
        queries=(Query(rate_of_ranks(steps.SAMPLES), "samples/s"),),
        unit=COUNT,
        thresholds=PLAIN_TEXT,
        dashboard=uid_of("step_anatomy"),
    ),
    Stat(
        title="Loss",
        description="Mean loss over ranks in the last step. If it is NaN or Inf, see the alert "
        "ZerowatchLossNotFinite.",
        queries=(Query(of_run(recorded.LOSS), "loss"),),
        unit=PLAIN,
        decimals=3,
        thresholds=PLAIN_TEXT,
    ),
)


def against_limit(rule: str, limit: float) -> str:
    """Return the highest value of all ranks, divided by the threshold of its alert."""
    return f"{by('max', rule)} / {limit}"


HELD_BACK = (
    BarGauge(
        title="Bottlenecks: share of each threshold",
        description="Each bar is a measurement divided by the threshold of its alert; from 100% on "
        "it is a problem. Begin with the longest bar. See the dashboard Communication for "
        "**communication** and **straggler**, Step anatomy for **waiting for data**, Devices for "
        "**idle device** (GPUs only), and Memory for **out of memory** and **replayed windows**.",
        queries=(
            Query(
                against_limit(of_run(recorded.EXPOSED_RATIO), EXPOSED_COMM_RATIO_HIGH),
                "communication",
                shape="now",
            ),
            Query(
                against_limit(
                    steady(of_ranks(recorded.STRAGGLER_SCORE), Timing()), STRAGGLER_SCORE_HIGH
                ),
                "straggler",
                shape="now",
            ),
            Query(
                against_limit(of_ranks(recorded.DATA_RATIO_BY_RANK), DATA_RATIO_HIGH),
                "waiting for data",
                shape="now",
            ),
            Query(
                f"(1 - {by('min', of_run(recorded.DEVICE_UTILIZATION, ON_GPU))})"
                f" / {round(1 - DEVICE_UTILIZATION_LOW, 6)}",
                "idle device",
                shape="now",
            ),
            Query(
                against_limit(of_ranks(recorded.OOM_RISK), OOM_RISK_HIGH),
                "out of memory",
                shape="now",
            ),
            Query(
                against_limit(of_run(recorded.REPLAY_RATIO), REPLAY_RATIO_HIGH),
                "replayed windows",
                shape="now",
            ),
        ),
        unit=RATIO,
        minimum=0,
        maximum=1.5,
        decimals=0,
        thresholds=CLOSE_TO_LIMIT,
        width=10,
        height=8,
    ),
    TimeSeries(
        title="Step time by phase",
        description="Seconds of a step in each phase, as a mean over ranks. Begin with the widest "
        "band. Communication is part of the phases, mostly of backward and optimizer.",
        queries=(Query(of_run(recorded.PHASE_SECONDS_PER_STEP), "{{phase}}"),),
        unit=SECONDS,
        minimum=0,
        stacked=True,
        colors=PHASE_COLORS,
        width=14,
        dashboard=uid_of("step_anatomy"),
    ),
    *sized(
        8,
        8,
        TimeSeries(
            title="Exposed communication",
            description="Share of training time in which training only waits for communication. If "
            "it is above the line, reduce it first: the dashboard Communication shows the cause.",
            queries=(
                Query(of_run(recorded.EXPOSED_RATIO), "5 minutes"),
                Query(of_run(recorded.EXPOSED_RATIO_LONG), "30 minutes"),
            ),
            unit=RATIO,
            minimum=0,
            thresholds=above(EXPOSED_COMM_RATIO_HIGH),
            dashboard=uid_of("communication"),
        ),
        TimeSeries(
            title="Devices busy",
            description="Share of time in which the devices work: the mean over ranks and the "
            "least busy rank. Below the line a GPU waits for communication or data, or needs "
            "larger batches. The line does not apply to CPUs, whose value is a share of all cores; "
            "the ranks of a host divide the cores among them.",
            queries=(
                Query(by("avg", of_ranks(recorded.DEVICE_UTILIZATION_BY_RANK)), "mean"),
                Query(by("min", of_ranks(recorded.DEVICE_UTILIZATION_BY_RANK)), "least busy"),
            ),
            unit=RATIO,
            minimum=0,
            maximum=1,
            thresholds=below(DEVICE_UTILIZATION_LOW),
            dashboard=uid_of("devices"),
        ),
        TimeSeries(
            title="Risk of running out of memory",
            description="Probability of an out-of-memory error within the next 50 steps, for the "
            f"ranks most at risk. From {OOM_RISK_HIGH:.0%} on, lower the micro-batch or use a "
            "higher ZeRO stage. The dashboard Memory shows what fills memory.",
            queries=(Query(worst(recorded.OOM_RISK, also="device"), "rank {{rank}} {{device}}"),),
            unit=RATIO,
            minimum=0,
            maximum=1,
            thresholds=above(OOM_RISK_HIGH, OOM_RISK_CRITICAL),
            dashboard=uid_of("memory"),
        ),
    ),
)

PROGRESS = sized(
    8,
    8,
    TimeSeries(
        title="Loss",
        description="Mean loss over ranks. Marks below the graph show when the tuner changed "
        "something or an alert fired.",
        queries=(Query(of_run(recorded.LOSS), "loss"),),
        unit=PLAIN,
    ),
    step_seconds(),
    TimeSeries(
        title="Throughput",
        description="Samples per second of the chosen ranks together. If it falls although the "
        "work is the same, the panels above show the reason.",
        queries=(Query(rate_of_ranks(steps.SAMPLES), "samples/s"),),
        unit=COUNT,
        minimum=0,
    ),
)

DETAILS = (
    Table(
        title="Alerts firing",
        description="The alerts of this run that fire now; the table should be empty. The page of "
        "an alert in the runbook explains what it means, how to confirm it and what to do first.",
        labels={"alertname": "Alert", "severity": "Severity", "rank": "Rank"},
        columns=(Column(title="", expression=f"max by (alertname, severity, rank) ({FIRING})"),),
        empty="no alert is firing",
        width=10,
    ),
    rank_table(
        title=f"The {TABLE_ROWS} slowest ranks",
        description="**Behind** is the time by which a rank is slower than the median rank, as a "
        "share of a step. One slow rank delays all others: check its node, its device and its "
        "data.",
        columns=(
            Column(
                title="Behind",
                expression=by("max", of_ranks(recorded.STRAGGLER_SCORE), "rank"),
                unit=RATIO,
                thresholds=above(STRAGGLER_SCORE_HIGH),
                decimals=1,
            ),
            Column(
                title="Step time",
                expression=by("max", of_ranks(recorded.STEP_DURATION_BY_RANK), "rank"),
                unit=SECONDS,
            ),
            Column(
                title="Exposed",
                expression=by("max", of_ranks(recorded.EXPOSED_RATIO_BY_RANK), "rank"),
                unit=RATIO,
                thresholds=above(EXPOSED_COMM_RATIO_HIGH),
                decimals=1,
            ),
            Column(
                title="GPU busy",
                expression=by("max", of_ranks(recorded.DEVICE_UTILIZATION_BY_RANK, ON_GPU), "rank"),
                unit=RATIO,
                thresholds=below(DEVICE_UTILIZATION_LOW),
                decimals=0,
            ),
            Column(
                title="Memory risk",
                expression=by("max", of_ranks(recorded.OOM_RISK), "rank"),
                unit=RATIO,
                thresholds=above(OOM_RISK_HIGH, OOM_RISK_CRITICAL),
                decimals=0,
            ),
        ),
        width=14,
    ),
    Text(
        title="How to read these dashboards",
        description="Notes on all dashboards.",
        content="Figures about a whole run are means of the last five minutes. A graph of many "
        "ranks shows those that were worst in the selected time; choose ranks at the top to see "
        "others. Each panel's **(i)** explains how to read it and what to do. Lines across a graph "
        "are thresholds of alerts. Marks below a graph are alerts, decisions of the tuner and "
        "starts of runs. Links at the top lead to the other dashboards and keep the run and ranks.",
        width=24,
        height=3,
    ),
)

DASHBOARD = Dashboard(
    name="overview",
    title="Overview",
    description="Is the run healthy, and what limits it?",
    rows=(
        Row("Is the run healthy?", HEALTH),
        Row("What limits it?", HELD_BACK),
        Row("Progress", PROGRESS),
        Row("Alerts and ranks", DETAILS),
    ),
    traces=('{ name = "train.step" && .zerowatch.run = "$run" }',),
)
