"""The dashboard Overhead: cost and reliability of monitoring."""

from __future__ import annotations

from ...metrics.catalog import overhead
from ...metrics.thresholds import COMM_COVERAGE_LOW, WATCH_RATIO_HIGH
from .. import recording_rules as recorded
from ..grafana.dashboard import Dashboard, Row
from ..grafana.panels import (
    ANY_IS_BAD,
    COUNT,
    PLAIN,
    PLAIN_TEXT,
    RATIO,
    SECONDS,
    BarGauge,
    Column,
    Query,
    Stat,
    TimeSeries,
    above,
    below,
)
from ..promql import by
from .queries import RANK, RANKS, limit, of_ranks, of_run, total, worst
from .shared_panels import RANK_LEGEND, fault_count, rank_table, sized

# Series that Prometheus itself records about each target.
UP = f"up{{{', '.join(RANKS)}}}"
SCRAPE_SECONDS = f"scrape_duration_seconds{{{', '.join(RANKS)}}}"
SERIES = f"scrape_samples_scraped{{{', '.join(RANKS)}}}"
PART_COLORS = {
    "hooks": "blue",
    "collectives": "purple",
    "watch_thread": "yellow",
    "cross_rank_thread": "orange",
    "http_thread": "green",
    "otlp_thread": "red",
    "monitoring_process": "dark-blue",
}

COST = (
    Stat(
        title="Cost of monitoring",
        description="Seconds of monitoring per second of the run, for the most expensive of the "
        "chosen ranks. Below 0.5% is usual. An alert fires if the mean of all ranks is above "
        f"{WATCH_RATIO_HIGH:.0%}: see the runbook.",
        queries=(Query(by("max", of_ranks(recorded.WATCH_RATIO_BY_RANK)), "cost"),),
        unit=RATIO,
        thresholds=above(WATCH_RATIO_HIGH / 2, WATCH_RATIO_HIGH),
        decimals=2,
        width=5,
    ),
    TimeSeries(
        title="Cost by part",
        description="Seconds of monitoring per second of the run, as a mean over ranks and five "
        "minutes. **hooks** and **collectives** run on the training thread, the rest on threads of "
        "zerowatch. If **collectives** is large, there are very many calls. After a start the "
        "value rises for five minutes.",
        queries=(Query(of_run(recorded.WATCH_RATIO_BY_PART), "{{part}}"),),
        unit=RATIO,
        minimum=0,
        stacked=True,
        colors=PART_COLORS,
        width=10,
    ),
    TimeSeries(
        title="Cost on the worst ranks",
        description="Seconds of monitoring per second of the run, for the most expensive ranks. "
        "The dashed line is the threshold of the alert, which applies to the mean of all ranks. "
        "Rank 0 does a little more work than the others.",
        queries=(
            Query(worst(recorded.WATCH_RATIO_BY_RANK), RANK_LEGEND),
            limit(WATCH_RATIO_HIGH),
        ),
        unit=RATIO,
        minimum=0,
        width=9,
    ),
)

DATA_QUALITY = (
    Stat(
        title="Ranks that answer",
        description="Number of chosen ranks that Prometheus reached at its last scrape; 0 after "
        "the run ends. If ranks are missing during training, see the alert ZerowatchRankVanished.",
        queries=(Query(f"sum({UP})", "up", shape="now"),),
        unit=PLAIN,
        thresholds=PLAIN_TEXT,
        plain=True,
        width=4,
        height=5,
    ),
    Stat(
        title="Coverage of collectives",
        description="Recorded collectives divided by all collectives, for the worst rank. Below "
        f"{COMM_COVERAGE_LOW:.0%} do not trust figures on communication.",
        queries=(Query(of_run(recorded.COVERAGE), "coverage"),),
        unit=RATIO,
        thresholds=below(COMM_COVERAGE_LOW),
        decimals=1,
        width=5,
        height=5,
    ),
    Stat(
        title="Age of the metrics",
        description="Time since the slowest rank updated its metrics. A few seconds are normal. "
        "Minutes mean that its watch thread is blocked, or that the run is over.",
        queries=(
            Query(
                f"time() - {by('min', of_ranks(overhead.WATCH_LAST_UPDATE_TIMESTAMP))}",
                "age",
                shape="now",
            ),
        ),
        unit=SECONDS,
        thresholds=PLAIN_TEXT,
        plain=True,
        width=5,
        height=5,
    ),
    fault_count(
        title="Failed hooks",
        description="Failures of hooks and threads since the start. zerowatch removes a failed "
        "hook and starts a thread over; training continues. The log has the traceback. Please "
        "report it.",
        expression=total(overhead.HOOK_FAILURES, "hook"),
        legend="{{hook}}",
        empty="none",
        width=5,
        height=5,
    ),
    fault_count(
        title="Failed exports",
        description="Failures to answer a scrape or to send to a collector since the start, by "
        "exporter. The log has the reason.",
        expression=total(overhead.EXPORTER_FAILURES, "exporter"),
        legend="{{exporter}}",
        empty="none",
        width=5,
        height=5,
    ),
    *sized(
        8,
        8,
        BarGauge(
            title="Dropped records",
            description="Records lost since the start, by the part that lost them; training always "
            "has priority. run_log: check whether the disk is full. steps or collectives: a step "
            "takes less time than the processing of its records.",
            queries=(Query(total(overhead.DROPPED_RECORDS, "part"), "{{part}}", shape="now"),),
            unit=PLAIN,
            minimum=0,
            thresholds=ANY_IS_BAD,
        ),
        TimeSeries(
            title="Failed exchanges per second",
            description="Failed exchanges of reports between ranks, per second, by reason. "
            "**store**: the c10d store did not answer. **peer**: a rank sent no report. "
            "**unmatched**: collectives could not be matched. A few failures are harmless.",
            queries=(Query(of_run(recorded.EXCHANGE_FAILURES_RATE), "{{reason}}"),),
            unit=PLAIN,
            minimum=0,
        ),
        TimeSeries(
            title="Longest time since a rank's report",
            description="Time since the last report of the rank that has been silent longest. Up "
            "to about seven seconds is normal, or 24 over a FileStore. If it only grows, that rank "
            "is stuck or gone.",
            queries=(Query(of_run(recorded.HEARTBEAT_AGE), "silence"),),
            unit=SECONDS,
            minimum=0,
        ),
    ),
)

SCRAPES = sized(
    8,
    8,
    TimeSeries(
        title="Scrape duration",
        description="Seconds that Prometheus takes to scrape a rank: the slowest and the mean of "
        "the chosen ranks. If it is near the scrape timeout, check the load of the host.",
        queries=(
            Query(f"max({SCRAPE_SECONDS})", "slowest"),
            Query(f"avg({SCRAPE_SECONDS})", "mean"),
        ),
        unit=SECONDS,
        minimum=0,
    ),
    TimeSeries(
        title="Series per rank",
        description="Number of time series that a rank serves: the maximum and the mean of the "
        "chosen ranks. With full detail some 350 is usual with data parallelism, 590 with 3D "
        "parallelism, 800 with a mixture of experts; rank 0 has 100 more. With "
        "serve.detail = lean it is at most 100, and 250 on rank 0.",
        queries=(Query(f"max({SERIES})", "most"), Query(f"avg({SERIES})", "mean")),
        unit=COUNT,
        minimum=0,
    ),
    rank_table(
        title="Most expensive ranks now",
        description="Seconds of monitoring per second of the run, for the most expensive ranks. "
        "See the panel Cost by part for the reason.",
        columns=(
            Column(
                title="Cost",
                expression=by("max", of_ranks(recorded.WATCH_RATIO_BY_RANK), *RANK),
                unit=RATIO,
                thresholds=above(WATCH_RATIO_HIGH),
                decimals=2,
            ),
        ),
    ),
)

DASHBOARD = Dashboard(
    name="overhead",
    title="Overhead",
    description="What does monitoring cost, and can its figures be trusted?",
    rows=(
        Row("Cost of monitoring", COST),
        Row("Can the figures be trusted?", DATA_QUALITY),
        Row("Scrapes", SCRAPES, collapsed=True),
    ),
)
