"""A run of 1,024 ranks in one Prometheus with the shipped rules, with full and with lean detail.

One process plays the ranks. scaled_prometheus.py writes the hour that the dashboards show.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import get_args

import psutil
from bench.bench_options import Options
from bench.result_table import Row
from bench.scale.job_profiles import PROFILES
from bench.scale.played_ranks import RUN
from bench.scale.query_times import Asked, dashboards, time_dashboard, time_queries
from bench.scale.rank_contents import INTERVAL_SECONDS, series_names
from bench.scale.scaled_prometheus import Store
from servers.grafana_reader import Reader

from zerowatch.metrics.settings import Detail

RANKS, PAST_SECONDS, LIVE_SECONDS = 1024, 3600, 180
QUICK_RANKS, QUICK_PAST_SECONDS, QUICK_LIVE_SECONDS = 32, 600, 40
GOAL_P95_SECONDS, GOAL_SECONDS = 1.0, 3.0
SLOWEST = 8
MAX_LEAN_SERIES = 100
HEATMAPS = ("heatmap", "status-history")
WATCHDOG = "ZerowatchWatchdog"


def bench(options: Options) -> Iterator[Row]:
    """Yield the series of kinds of jobs, then size, cost and query times with either detail."""
    yield from _profiles()
    if shutil.which("prometheus") is None:
        yield Row(what="scale", measured="needs prometheus on PATH (apt-get install prometheus)")
        return
    for detail in get_args(Detail):
        for row in _with_detail(detail, options):
            yield replace(row, what=f"{detail}: {row.what}")


def _profiles() -> Iterator[Row]:
    """Count what a rank and a run serve, by kind of job; Prometheus is not needed."""
    for profile, detail in itertools.product(PROFILES, get_args(Detail)):
        first, other = (
            len(series_names(profile, detail, on_rank_zero=on_rank_zero))
            for on_rank_zero in (True, False)
        )
        is_lean = detail == "lean"
        yield Row(
            what=f"{detail}: series per rank, {profile.name}",
            measured=str(other),
            spread=f"rank 0 {first}; {first + (RANKS - 1) * other:,} of {RANKS:,} ranks",
            goal=f"<= {MAX_LEAN_SERIES}" if is_lean else "",
            met=other <= MAX_LEAN_SERIES if is_lean else None,
        )


def _with_detail(detail: Detail, options: Options) -> Iterator[Row]:
    ranks = QUICK_RANKS if options.quick else RANKS
    past = QUICK_PAST_SECONDS if options.quick else PAST_SECONDS
    live = QUICK_LIVE_SECONDS if options.quick else LIVE_SECONDS
    with (
        tempfile.TemporaryDirectory(prefix="zerowatch-bench-") as folder,
        closing(Store(Path(folder), ranks, past, detail)) as store,
    ):
        speed = store.filled_samples / store.fill_seconds
        yield Row(
            what=f"past of {ranks} ranks written, {past / 60:.0f} min and its rules",
            measured=f"{store.filled_samples / 1e6:.1f} M samples in {store.fill_seconds:.0f} s",
            spread=f"{speed / 1000:.0f} k/s",
        )
        yield from _live(store, ranks, live)
        # All ranks. A variable of another name, such as a run to compare with, gets this run too.
        shown = defaultdict(lambda: [RUN], job=["zerowatch"])
        yield from _queries(store, Reader(variables=shown, range_seconds=past), detail)


def _live(store: Store, ranks: int, seconds: float) -> Iterator[Row]:
    """Measure the cost of scraping for a while."""
    time.sleep(2 * INTERVAL_SECONDS)  # all ranks are scraped at least once
    process = psutil.Process(store.prometheus.process.pid)
    samples, cpu = _samples(store), sum(process.cpu_times()[:2])
    groups: dict[str, list[float]] = {}
    begun = time.monotonic()
    while time.monotonic() < begun + seconds:
        time.sleep(INTERVAL_SECONDS)
        for group in store.prometheus.ask("rules")["groups"]:
            groups.setdefault(group["name"], []).append(group["evaluationTime"])
    took = time.monotonic() - begun
    cpu, samples = sum(process.cpu_times()[:2]) - cpu, _samples(store) - samples
    up = store.prometheus.series("sum(up)")[0]["value"][1]
    slowest = store.prometheus.series("quantile(0.99, scrape_duration_seconds)")[0]["value"][1]
    yield Row(
        what="ranks up, scraped each 15 s",
        measured=up,
        spread=f"p99 of a scrape {1000 * float(slowest):.0f} ms",
        goal=str(ranks),
        met=up == str(ranks),
    )
    scraped = store.prometheus.series("sum(scrape_samples_scraped)")[0]["value"][1]
    yield Row(
        what="series, those of the rules included",
        measured=f"{store.metric('prometheus_tsdb_head_series'):,.0f}",
        spread=f"{int(scraped) / ranks:.0f} per rank scraped",
    )
    firing = store.prometheus.series('count by (alertname) (ALERTS{alertstate="firing"})')
    yield Row(
        what="alerts that fire on a healthy run, the watchdog left out",
        measured=", ".join(
            name for each in firing if (name := each["metric"]["alertname"]) != WATCHDOG
        ),
    )
    yield Row(what="samples ingested", measured=f"{samples / took:,.0f} /s")
    yield Row(
        what="Prometheus: memory (RSS), CPU",
        measured=f"{process.memory_info().rss / 2**30:.1f} GiB, {cpu / took:.2f} cores",
    )
    yield from _rules(store, groups)


def _rules(store: Store, groups: dict[str, list[float]]) -> Iterator[Row]:
    slowest = max(groups, key=lambda name: max(groups[name]))
    together = sum(statistics.median(times) for times in groups.values())
    yield Row(
        what="rules: slowest evaluation of a group",
        measured=f"{max(groups[slowest]):.2f} s",
        spread=f"{slowest}; all {len(groups)} together {together:.2f} s",
        goal=f"< {INTERVAL_SECONDS} s",
        met=max(groups[slowest]) < INTERVAL_SECONDS,
    )
    missed = store.metric("prometheus_rule_group_iterations_missed_total")
    failed = store.metric("prometheus_rule_evaluation_failures_total")
    yield Row(
        what="rules: evaluations missed, failed",
        measured=f"{missed:.0f}, {failed:.0f}",
        goal="0, 0",
        met=not missed and not failed,
    )


def _queries(store: Store, reader: Reader, detail: Detail) -> Iterator[Row]:
    all_asked: list[Asked] = []
    for dashboard in dashboards():
        asked = time_queries(store.prometheus, dashboard, reader)
        together = time_dashboard(store.prometheus, dashboard, reader)
        all_asked += asked
        yield Row(
            what=f"{dashboard['title']}: {len(asked)} queries, slowest",
            measured=f"{max(query.seconds for query in asked):.2f} s",
            spread=f"median {statistics.median(q.seconds for q in asked):.3f} s; "
            f"all, 6 at once: {together:.2f} s",
        )
    times = [query.seconds for query in all_asked]
    p95 = statistics.quantiles(times, n=20)[-1]
    yield Row(
        what=f"all {len(times)} queries of the last {reader.range_seconds / 60:.0f} min: p95",
        measured=f"{p95:.2f} s",
        spread=f"p50 {statistics.median(times):.3f} s",
        goal=f"< {GOAL_P95_SECONDS:g} s",
        met=p95 < GOAL_P95_SECONDS,
    )
    empty = [q.name for q in all_asked if not q.series and ": annotation" not in q.name]
    yield Row(
        what="queries without data, annotations left out",
        measured=str(len(empty)),
        spread="; ".join(empty) if detail == "full" else "",
    )
    yield Row(
        what="the slowest",
        measured=f"{max(times):.2f} s",
        goal=f"< {GOAL_SECONDS:g} s",
        met=max(times) < GOAL_SECONDS,
    )
    heatmaps = [query for query in all_asked if query.panel_type in HEATMAPS]
    if heatmaps:
        yield Row(
            what="the slowest heatmap",
            measured=f"{max(query.seconds for query in heatmaps):.2f} s",
            goal=f"< {GOAL_SECONDS:g} s",
            met=max(query.seconds for query in heatmaps) < GOAL_SECONDS,
        )
    slowest = sorted(all_asked, key=lambda query: -query.seconds)[:SLOWEST]
    for query in dict.fromkeys([*slowest, *heatmaps]):
        yield Row(
            what=f"- {query.name}" + (" [heatmap]" if query in heatmaps else ""),
            measured=f"{query.seconds:.3f} s",
            spread=f"{query.series} series",
        )


def _samples(store: Store) -> float:
    return store.metric("prometheus_tsdb_head_samples_appended_total")
