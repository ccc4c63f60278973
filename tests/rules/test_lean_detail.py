"""With `serve.detail = "lean"` all alerts and the Overview work; the rest is listed, with reasons.

`pytest -s` on this file prints the recording rules and panels with gaps, and what they miss.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

import promql_parser
import pytest
import yaml
from bench.scale.job_profiles import PROFILES
from bench.scale.rank_contents import series_names
from package_tree import ROOT
from promql_parser import AggregateExpr, BinaryExpr, MatchOp, VectorSelector
from promql_parts import children, selectors
from rules.lean_series import lean_series
from rules.promtool import ALERTS, RECORDING, failures
from rules.test_alerts import CASES
from servers.grafana_reader import Reader, dashboard_queries

from zerowatch.dashboards.build import dashboard_files
from zerowatch.dashboards.prometheus_files import rule_files
from zerowatch.dashboards.recording_rules import COLLECTIVE_BUCKETS
from zerowatch.dashboards.timing import Timing
from zerowatch.metrics.catalog import (
    CATALOG,
    devices,
    generation,
    memory,
    overhead,
    training,
    window,
)
from zerowatch.metrics.catalog import communication as comm
from zerowatch.metrics.catalog.spec import MetricSpec

COMPLETE_DASHBOARDS = {"zerowatch-runs", "zerowatch-overview"}
# Panels of these dashboards that miss a part, and why.
INCOMPLETE_PANELS = {"Step time": "exemplars, which lead to traces, belong to buckets"}
# The metrics of which lean leaves out all or some series, by the reason.
LEFT_OUT = {
    "op x group x phase, or op x buckets: most series of a large job": {
        comm.COLLECTIVE_CALLS,
        comm.COLLECTIVE_BYTES,
        comm.COLLECTIVE_WIRE_BYTES,
        comm.COLLECTIVE_DURATION,
        comm.COMM_BUS_BANDWIDTH,
    },
    "added up over its label; full detail shows the parts": {
        comm.COMM_SECONDS,
        comm.COMM_EXPOSED_SECONDS,
        comm.COMM_WAIT_SECONDS,
        overhead.WATCH_SECONDS,
    },
    "the parts that an alert reads are served": {
        comm.EXCHANGE_FAILURES,
        devices.DEVICE_ECC_ERRORS,
        overhead.DROPPED_RECORDS,
    },
    "buckets; the exact quantiles of each rank are served": {training.STEP_DURATION},
    "the use that the limit applies to is served, the states that explain it are not": {
        memory.MEMORY_BYTES,
        memory.MEMORY_PEAK,
    },
    "the busy seconds, of which it is the current value, are served": {devices.DEVICE_UTILIZATION},
    "explains communication that an alert or the Overview has found": {
        comm.COMM_OWN_EXPOSED_SECONDS,
        comm.COMM_TRANSFER_SECONDS,
        comm.COMM_CAUSE_SECONDS,
        comm.COMM_LINK_LATENCY,
        comm.COMM_LINK_BEST_BANDWIDTH,
        comm.COMM_VOLUME_RATIO,
        comm.COMM_STEP_WIRE_BYTES,
        comm.COMM_EXPOSED_ERROR_RATIO,
        comm.STEP_TIME_RATIO,
        comm.PEER_HEARTBEAT_AGE,
    },
    "explains memory that an alert or the Overview has found": {
        memory.MEMORY_CATEGORY_BYTES,
        memory.MEMORY_BASELINE,
        memory.MEMORY_PHASE_PEAK,
        memory.MEMORY_FRAGMENTATION,
        memory.MEMORY_PREDICTED_PEAK,
        memory.MEMORY_PREDICTION_ERROR,
        memory.MEMORY_HEADROOM,
        memory.OOM_NEXT_BATCH_RISK,
        memory.OOM_ETA_STEPS,
        memory.ALLOC_RETRIES,
        memory.OOMS,
        memory.OFFLOAD_BYTES,
        memory.OFFLOAD_SECONDS,
    },
    "explains a phase that the Overview shows": set(generation.METRICS),
    "beside training; the seconds in which training stopped are served": {
        training.CHECKPOINT_BACKGROUND_SECONDS,
    },
    "dcgm-exporter serves it once per GPU": {
        devices.DEVICE_SM_ACTIVE,
        devices.DEVICE_POWER,
        devices.DEVICE_CLOCK,
        devices.DEVICE_ENERGY,
        devices.DEVICE_LINK_BYTES,
        devices.DEVICE_REMAPPED_ROWS,
    },
    "a state is served that says the same": {comm.HANGS, training.FLOPS, training.PEAK_FLOPS},
    "a setting of the run, the same on most ranks; it is in the run log": {
        training.LEARNING_RATE,
        window.MICRO_BATCH_SAMPLES,
        window.BATCH_SHARE,
        window.COMPRESSION_ERROR,
    },
}
_RULES = {
    file: [
        rule
        for group in yaml.safe_load(rule_files(timing=Timing())[file])["groups"]
        for rule in group["rules"]
    ]
    for file in (RECORDING, ALERTS)
}
# A name may be recorded by several rules, for parts of its series.
RECORDED: dict[str, list[str]] = defaultdict(list)
for _rule in _RULES[RECORDING]:
    RECORDED[_rule["record"]].append(_rule["expr"])
ALERT_EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in _RULES[ALERTS]}
_BY_NAME = {spec.name: spec for spec in CATALOG}
_PARTS = ("_sum", "_count", "_bucket")


def gaps(expression: str, recorded_as: str = "") -> set[str]:
    """Return the metrics that an expression reads, also by recording rules, but lean leaves out.

    A rule may read its own last value.
    """
    return set(_gaps(promql_parser.parse(expression), frozenset(), recorded_as))


def _gaps(node: promql_parser.Expr, labels: frozenset[str], recorded_as: str) -> Iterator[str]:
    """Yield the metrics; `labels` are those that the expression around `node` needs."""
    if isinstance(node, VectorSelector):
        name = node.name or ""
        for expression in RECORDED.get(name, ()) if name != recorded_as else ():
            yield from gaps(expression, name)
        part = next((part for part in _PARTS if name.endswith(part)), "")
        spec = _BY_NAME.get(name) or _BY_NAME.get(name.removesuffix(part))
        if spec is not None and not _is_served(spec, part, node, labels):
            yield spec.name
    if isinstance(node, AggregateExpr) and node.modifier is not None:
        labels |= set(node.modifier.labels)
    if isinstance(node, BinaryExpr) and node.modifier is not None and node.modifier.matching:
        labels |= set(node.modifier.matching.labels)
    for child in children(node):
        yield from _gaps(child, labels, recorded_as)


def _is_served(
    spec: MetricSpec, part: str, selector: VectorSelector, labels: frozenset[str]
) -> bool:
    matchers = {each.name: each for each in selector.matchers.matchers}
    if spec.lean is None or (spec.buckets and part == "_bucket"):
        return False
    if not set(spec.lean.without).isdisjoint(labels | matchers.keys()):
        return False
    return all(
        name in matchers and matchers[name].op == MatchOp.Equal and matchers[name].value in values
        for name, values in spec.lean.only.items()
    )


def panel_expressions() -> Iterator[tuple[str, str, str]]:
    """Yield dashboard, panel and expression of all queries."""
    reader = Reader(variables=defaultdict(lambda: ("some",)))
    for text in dashboard_files().values():
        dashboard = json.loads(text)
        for query in dashboard_queries(dashboard):
            yield dashboard["uid"], query.panel, reader.fill_in(query, dashboard)


@pytest.mark.parametrize("alert", ALERT_EXPRESSIONS)
def test_an_alert_reads_only_what_is_served(alert):
    assert gaps(ALERT_EXPRESSIONS[alert]) == set()


def test_complete_dashboards_read_only_what_is_served():
    missing = {
        panel: gaps(expression)
        for dashboard, panel, expression in panel_expressions()
        if dashboard in COMPLETE_DASHBOARDS and gaps(expression)
    }

    assert missing.keys() <= INCOMPLETE_PANELS.keys(), missing


def test_each_metric_of_which_series_are_left_out_has_a_reason():
    left_out = {
        spec.name
        for spec in CATALOG
        if spec.lean is None or spec.lean.without or spec.lean.only or spec.buckets
    }

    assert left_out == {spec.name for specs in LEFT_OUT.values() for spec in specs}


def test_rules_and_panels_with_gaps_are_listed_with_the_reason(capsys):
    reasons = {spec.name: reason for reason, specs in LEFT_OUT.items() for spec in specs}
    found = [
        (place, name)
        for place, expression in (
            *((name, each) for name, each in ALERT_EXPRESSIONS.items()),
            *((name, each) for name, expressions in RECORDED.items() for each in expressions),
            *((f"{board}: {panel}", each) for board, panel, each in panel_expressions()),
        )
        for name in sorted(gaps(expression))
    ]

    assert {name for _, name in found} <= reasons.keys()
    print()
    for place, name in dict.fromkeys(found):
        print(f"{place}: {name} ({reasons[name]})")


@pytest.mark.parametrize(
    ("expression", "missing"),
    [
        ("zerowatch_loss", set()),
        ('rate(zerowatch_collective_calls_total{op="barrier"}[5m])', {comm.COLLECTIVE_CALLS}),
        ("sum by (job, run) (zerowatch_comm_seconds_total)", set()),
        ("sum by (job, group) (zerowatch_comm_seconds_total)", {comm.COMM_SECONDS}),
        ('zerowatch_comm_seconds_total{group="dp"}', {comm.COMM_SECONDS}),
        ('zerowatch_memory_peak_bytes{state="allocated"}', set()),
        ('zerowatch_memory_peak_bytes{state="reserved"}', {memory.MEMORY_PEAK}),
        ("zerowatch_memory_peak_bytes", {memory.MEMORY_PEAK}),
        ("zerowatch_step_duration_seconds_sum / zerowatch_step_duration_seconds_count", set()),
        ("zerowatch_step_duration_seconds_bucket", {training.STEP_DURATION}),
        (f"{COLLECTIVE_BUCKETS.name} > 1", {comm.COLLECTIVE_DURATION}),
    ],
)
def test_a_gap_is_found(expression, missing):
    assert gaps(expression) == {spec.name for spec in missing}


def reads(expression: str) -> set[str]:
    """Return the series that an expression reads, with those of the recording rules it reads."""
    names, unread = set[str](), [expression]
    while unread:
        found = {name for name, _ in selectors(unread.pop())} - names
        names |= found
        unread += [inner for name in found for inner in RECORDED.get(name, ())]
    return names


@cache
def documented_drop() -> re.Pattern[str]:
    """Return the regular expression of `metric_relabel_configs` in the documentation."""
    page = (ROOT / "docs" / "deployment.md").read_text()
    blocks = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    (rule,) = [
        rule
        for block in blocks
        for scrape in block["scrape_configs"]
        for rule in scrape.get("metric_relabel_configs", ())
        if rule["action"] == "drop"
    ]
    return re.compile(rule["regex"])


def test_no_alert_and_no_panel_of_the_overview_reads_what_the_documentation_drops():
    drop = documented_drop()
    expressions = [
        *ALERT_EXPRESSIONS.items(),
        *(
            (panel, expression)
            for dashboard, panel, expression in panel_expressions()
            if dashboard in COMPLETE_DASHBOARDS and panel not in INCOMPLETE_PANELS
        ),
    ]

    dropped = {
        (place, name)
        for place, expression in expressions
        for name in filter(drop.fullmatch, reads(expression))
    }

    assert dropped == set()


@pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)
def test_what_the_documentation_does_not_drop_is_a_fraction(profile):
    names = series_names(profile, "full", on_rank_zero=False)

    left = [name for name in names if not documented_drop().fullmatch(name)]

    assert 140 <= len(left) <= 185


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [each for each in CASES if each.alert], ids=lambda case: case.title
)
def test_an_alert_fires_and_recovers_at_the_same_evaluations(case, alert_rules, tmp_path):
    test = case.test()
    test["input_series"] = lean_series(test["input_series"])

    assert failures(alert_rules, [test], tmp_path) == ""
