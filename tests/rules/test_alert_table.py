"""The alerts have the listed urgency and durations, and silence their consequences only."""

from __future__ import annotations

import promql_parser
import pytest
from promql_parts import known_series, nodes
from rules.expressions import unknown

from zerowatch.dashboards import recording_rules
from zerowatch.dashboards.alerts import (
    alerts,
    communication,
    guards,
    hardware,
    liveness,
    memory,
    numerics,
    overhead,
    prometheus,
    training,
)
from zerowatch.dashboards.alerts.alert import Alert, InhibitRule, Links
from zerowatch.dashboards.alerts.dcgm import dcgm_alerts
from zerowatch.dashboards.timing import Timing

# Without the prefix Zerowatch: component, severity, how long the problem lasts before the alert
# fires, how long it fires after the problem has ended, and the dashboard to look at.
LISTED = """
CommBottleneck communication warning 2m 5m communication
CommRatioRose communication warning 10m 5m communication
LinkSlow communication warning 2m 5m communication
StragglerRank communication warning 2m 5m communication
CollectiveMismatch communication critical 0 5m communication
CommCoverageLow communication info 5m 15m overhead
RunDied training critical 75s 0 overview
RankVanished training critical 75s 0 overview
RankHung training critical 0 1m overview
TrainingStalled training critical 5m 0 overview
NoFirstStep training critical 13m 0 overview
TargetNeverUp training warning 5m 0 overhead
RanksMissing training warning 5m 0 overhead
Restarting training critical 0 5m overview
DataBound training warning 10m 5m step-anatomy
LowDeviceUtilization devices warning 10m 5m devices
MfuDropped training warning 10m 5m step-anatomy
CheckpointOverdue training warning 1m 10m overview
CheckpointFailed training warning 0 5m overview
LossNotFinite training critical 0 5m step-anatomy
LossScaleCollapse training critical 0 5m step-anatomy
LossSpike training warning 2m 5m step-anatomy
GradientNormExploding training warning 1m 5m step-anatomy
UpdatesSkipped training warning 5m 5m step-anatomy
OomRiskHigh memory warning 30s 5m memory
OomRiskCritical memory critical 0 5m memory
HostMemoryRisk memory critical 30s 5m memory
HostMemoryNodeFull memory critical 1m 5m memory
MemoryLeak memory warning 2m 5m memory
OomReplays memory warning 2m 5m memory
GpuLost devices critical 0 1h devices
GpuXid devices critical 0 1h devices
GpuXidMinor devices warning 0 5m devices
GpuUncorrectableEcc devices critical 0 1h devices
GpuRowRemapFailed devices critical 0 1h devices
GpuRowRemap devices warning 0 1h devices
GpuLinkErrors devices warning 0 30m devices
GpuThrottled devices warning 2m 5m devices
GpuHot devices warning 5m 5m devices
WatchOverhead watch info 10m 15m overhead
MonitoringDead watch warning 0 5m overhead
MonitoringFailing watch warning 0 5m overhead
RecordsLost watch warning 0 5m overhead
MetricsStale watch warning 2m 0 overhead
TunerSafeMode tuner warning 0 5m tuner
Watchdog prometheus none 0 0 overhead
PrometheusDiscoveryFailing prometheus warning 5m 5m overhead
PrometheusRulesFailing prometheus warning 5m 5m overhead
PrometheusLimitExceeded prometheus warning 1m 5m overhead
PrometheusNotificationsFailing prometheus critical 5m 5m overhead
AlertmanagerNotificationsFailing prometheus critical 5m 5m overhead
PrometheusConfigRejected prometheus warning 5m 0 overhead
DcgmXid devices critical 0 5m devices
DcgmXidMinor devices warning 0 5m devices
DcgmUncorrectableEcc devices critical 0 1h devices
DcgmRowRemapFailed devices critical 0 5m devices
DcgmRowRemap devices warning 0 5m devices
DcgmLinkErrors devices warning 0 30m devices
DcgmThrottled devices warning 2m 5m devices
DcgmHot devices warning 5m 5m devices
"""
OF_SLOW_RUNS = (
    "CommBottleneck CommRatioRose DataBound LinkSlow LowDeviceUtilization MfuDropped StragglerRank"
)
INHIBITED = {
    "CommBottleneck": "CommRatioRose MfuDropped",
    "CommRatioRose": "MfuDropped",
    "LinkSlow": "MfuDropped",
    "StragglerRank": "MfuDropped",
    "RunDied": "TrainingStalled",
    "RankVanished": "TrainingStalled",
    "RankHung": f"TrainingStalled {OF_SLOW_RUNS}",
    "TrainingStalled": OF_SLOW_RUNS,
    "DataBound": "LowDeviceUtilization MfuDropped",
    "LossScaleCollapse": "UpdatesSkipped",
    "OomRiskCritical": "OomRiskHigh",
    "GpuXid": "GpuXidMinor",
    "GpuRowRemapFailed": "GpuRowRemap",
    "MonitoringDead": "MonitoringFailing MetricsStale",
}
# An alert of these silences others of the same rank or GPU only, and not of the whole run.
SAME = {
    "OomRiskCritical": ("job", "run", "rank", "device"),
    "GpuXid": ("job", "run", "rank", "node", "device"),
    "GpuRowRemapFailed": ("job", "run", "rank", "node", "device"),
    "MonitoringDead": ("job", "run", "rank"),
}
ALERTS = (*alerts(Timing()), *dcgm_alerts(Timing()))
BY_MODULE = (
    communication.communication_alerts,
    liveness.liveness_alerts,
    training.training_alerts,
    numerics.numerics_alerts,
    memory.memory_alerts,
    hardware.hardware_alerts,
    overhead.overhead_alerts,
    prometheus.prometheus_alerts,
    dcgm_alerts,
)
# Labels of dcgm-exporter, of the alerts on servers, and of joins.
OTHER_LABELS = {
    "UUID",
    "Hostname",
    "gpu",
    "uuid",
    "part",
    "rule_group",
    "scrape_job",
    "limit",
    "address",
    "alertmanager",
}
SECONDS = {"s": 1, "m": 60, "h": 3600, "0": 0}


def short(name: str) -> str:
    return name.removeprefix("Zerowatch")


def seconds(duration: str) -> float:
    return float(duration.rstrip("smh")) * SECONDS[duration[-1]]


def test_each_alert_has_the_listed_urgency_durations_and_dashboard():
    found = [
        (short(a.name), a.component, a.severity, a.for_seconds, a.keep_firing_seconds, a.dashboard)
        for a in ALERTS
    ]

    assert found == [
        (name, component, severity, seconds(wait), seconds(keep), f"zerowatch-{dashboard}")
        for name, component, severity, wait, keep, dashboard in map(
            str.split, LISTED.strip().splitlines()
        )
    ]


def test_the_alerts_of_all_modules_are_known_in_this_order():
    assert tuple(alert for make in BY_MODULE for alert in make(Timing())) == ALERTS


@pytest.mark.parametrize("make", BY_MODULE, ids=lambda make: make.__name__)
def test_expressions_are_promql_that_aggregates_and_matches_by_known_labels(make):
    known = {
        "job",
        *OTHER_LABELS,
        *(label for labels in known_series().values() for label in labels),
    }

    for alert in make(Timing()):
        for node in nodes(promql_parser.parse(alert.expression)):
            modifier = getattr(node, "modifier", None)
            matching = getattr(modifier, "matching", None)
            labels = getattr(modifier, "labels", None) or getattr(matching, "labels", None) or ()
            assert set(labels) <= known, alert.name
        if make is not dcgm_alerts:
            assert unknown(alert.expression) == []


def test_an_alert_inhibits_the_listed_ones_of_the_same_run_or_rank():
    rules = {short(alert.name): alert.inhibits for alert in ALERTS if alert.inhibits}

    assert rules == {
        name: InhibitRule(
            alerts=tuple(f"Zerowatch{each}" for each in inhibited.split()),
            less_urgent=name in ("RunDied", "RankVanished"),
            same=SAME.get(name, ("job", "run")),
        )
        for name, inhibited in INHIBITED.items()
    }


def test_alerts_of_servers_and_of_gpus_outside_of_runs_are_about_no_run():
    about_none = {short(alert.name) for alert in ALERTS if not alert.about_run}

    assert about_none == {
        *(
            name.split()[0]
            for name in LISTED.strip().splitlines()
            if name.split()[1] == "prometheus"
        ),
        *(short(alert.name) for alert in dcgm_alerts(Timing())),
    }


@pytest.mark.parametrize(
    ("links", "urls"),
    [
        (
            Links(runbook="https://wiki", grafana="https://grafana"),
            ("https://wiki#the-page", "https://grafana/d/page"),
        ),
        (
            Links(),
            (
                "{{with $externalLabels.zerowatch_runbook}}{{.}}#the-page{{end}}",
                "{{with $externalLabels.zerowatch_grafana}}{{.}}/d/page{{end}}",
            ),
        ),
    ],
)
def test_the_links_of_an_alert_have_given_addresses_or_those_of_external_labels(links, urls):
    alert = Alert(
        name="Name",
        component="watch",
        severity="info",
        expression="up",
        for_seconds=1,
        keep_firing_seconds=2,
        summary="What",
        description="Why",
        dashboard="page",
        about_run=False,
        page="The-Page",
    )

    runbook, grafana = urls
    assert alert.annotations(links) == {
        "summary": "What",
        "description": "Why",
        "runbook_url": runbook,
        "dashboard_url": grafana,
    }
    assert alert.labels == {"component": "watch", "severity": "info"}


def flat(expression: str) -> str:
    return " ".join(expression.split())


def test_guards_restrict_an_expression_to_runs_in_training_of_some_steps_or_age():
    rule = recording_rules.LOSS
    gpu = 'zerowatch_memory_bytes{device!="cpu", state="allocated"}'

    assert flat(guards.while_training("up")) == "up and on (job, run) zerowatch_run_active == 1"
    assert flat(guards.while_training("up", "rank")) == (
        "up and on (job, run, rank) zerowatch_run_active == 1"
    )
    assert flat(guards.after_some_steps("up", Timing())) == (
        "up and on (job, run) max by (job, run) (zerowatch_steps_total) >= 10"
        " and on (job, run) max by (job, run) (increase(zerowatch_steps_total[30m])) > 0"
    )
    assert flat(guards.after_new_step("up", "2m")) == (
        "up and on (job, run) max by (job, run) (zerowatch_steps_total)"
        " != max by (job, run) (last_over_time(zerowatch_steps_total[5m] offset 2m))"
    )
    assert flat(guards.after_some_time("up", rule, "15m")) == (
        f"up and on (job, run) {rule.name} offset 15m"
    )
    assert flat(guards.on_gpu("up")) == f"up and on (job, run, rank) {gpu}"
    assert flat(guards.not_on_gpu("up")) == f"up unless on (job, run, rank) {gpu}"
