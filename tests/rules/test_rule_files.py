"""Tests of the rule files: promtool accepts them, and they use existing metrics and labels."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml
from package_tree import ROOT
from promql_parts import children, nodes, selectors
from require import program
from rules.expressions import unknown
from rules.promtool import ALERTS, DCGM, RECORDING, RULE_FILES, written

from zerowatch.dashboards import recording_rules as recorded
from zerowatch.dashboards.alerts import alerts
from zerowatch.dashboards.alerts.alert import Links
from zerowatch.dashboards.alerts.dcgm import dcgm_alerts
from zerowatch.dashboards.alerts.hardware import XID_MINOR, hardware_alerts
from zerowatch.dashboards.prometheus_files import rule_files
from zerowatch.dashboards.recording_rules import GROUPS
from zerowatch.dashboards.timing import HOUR, Timing
from zerowatch.metrics.catalog.training import RUN_ACTIVE
from zerowatch.metrics.thresholds import THRESHOLDS

DASHBOARDS = {
    "zerowatch-overview",
    "zerowatch-step-anatomy",
    "zerowatch-communication",
    "zerowatch-memory",
    "zerowatch-devices",
    "zerowatch-tuner",
    "zerowatch-overhead",
}
KNOWN = {alert.name: alert for alert in alerts(Timing())}
EXPRESSIONS = {
    **{alert.name: alert.expression for alert in KNOWN.values()},
    **{rule.name: rule.expression(Timing()) for rules in GROUPS.values() for rule in rules},
}
OF_RUNS = {name: alert for name, alert in KNOWN.items() if alert.about_run}
FAULTS = {
    alert.name for alert in hardware_alerts(Timing()) if alert.keep_firing_seconds == HOUR
} | {XID_MINOR}
each_alert = pytest.mark.parametrize("alert", KNOWN.values(), ids=KNOWN)


def check(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [program("promtool", apt="prometheus"), "check", "rules", "--lint=all"]
    files = [str(folder / name) for name in RULE_FILES]
    return subprocess.run(
        [*command, "--lint-fatal", *files], capture_output=True, text=True, check=False
    )


def test_promtool_accepts_the_rule_files(rules):
    ended = check(rules)

    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("file", "ours", "wrong", "complaint"),
    [
        (RECORDING, "sum by (job, run)", "sum over (job, run)", "parse error"),
        (ALERTS, "for: 2m", "for: 2 minutes", "not a valid duration string"),
        (ALERTS, "{{ $value | humanizePercentage }}", "{{ $value | humanise }}", "humanise"),
        (ALERTS, "keep_firing_for", "keep_fire_for", "keep_fire_for"),
    ],
)
def test_promtool_rejects_faulty_rules(file, ours, wrong, complaint, tmp_path):
    files = rule_files()
    mutated = files[file].replace(ours, wrong, 1)

    ended = check(written({**files, file: mutated}, tmp_path))

    assert mutated != files[file]
    assert ended.returncode != 0
    assert complaint in ended.stdout + ended.stderr


def test_promtool_rejects_duplicate_rules(tmp_path):
    files = rule_files()
    content = yaml.safe_load(files[RECORDING])
    content["groups"][0]["rules"].append(content["groups"][0]["rules"][0])

    ended = check(written({**files, RECORDING: yaml.safe_dump(content)}, tmp_path))

    assert ended.returncode != 0
    assert "duplicate rule" in ended.stdout + ended.stderr


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_a_rule_names_only_metrics_and_labels_that_exist(name):
    assert unknown(EXPRESSIONS[name]) == []


def test_an_unknown_metric_or_label_is_reported():
    assert unknown("rate(zerowatch_step_total[5m])") == ["zerowatch_step_total: no metric"]
    assert unknown('sum(zerowatch_loss{phase="data"}) > 1') == ["zerowatch_loss: phase"]
    assert unknown("zerowatch_step_duration_seconds") == [
        "zerowatch_step_duration_seconds: no metric"
    ]
    assert unknown('zerowatch_step_duration_seconds_bucket{le="1.0"}') == []


def _kept(node: promql_parser.Expr) -> set[str]:
    """Return the recorded series of which the value of an expression keeps all labels."""
    if isinstance(node, promql_parser.VectorSelector):
        return {node.name or ""} & {rule.name for rules in GROUPS.values() for rule in rules}
    if isinstance(node, promql_parser.AggregateExpr):
        return set()
    return {name for child in children(node) for name in _kept(child)}


def _mixed(expression: str) -> list[str]:
    """Return the operations that match recorded series with others by all labels."""
    return [
        node.prettify()
        for node in nodes(promql_parser.parse(expression))
        if isinstance(node, promql_parser.BinaryExpr)
        and not (node.modifier and node.modifier.matching)
        and str(node.op) != "or"
        and all(selectors(side.prettify()) for side in (node.lhs, node.rhs))
        and bool(_kept(node.lhs)) != bool(_kept(node.rhs))
    ]


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_recorded_series_are_matched_with_others_by_the_labels_of_a_run(name):
    """A server that stores results elsewhere, such as Thanos Ruler, may add labels to them."""
    assert _mixed(EXPRESSIONS[name]) == []


def test_an_operation_on_recorded_and_other_series_is_found():
    recorded = "run:zerowatch_loss:avg"

    assert _mixed(f"{recorded} - max by (job, run) (zerowatch_loss)")
    assert not _mixed(f"max by (job, run) ({recorded}) - max by (job, run) (zerowatch_loss)")
    assert not _mixed(f"time() - {recorded}")


def test_a_week_is_read_of_hourly_values_only():
    """A week of a rule that has a value at each evaluation takes too long to read."""
    week = re.compile(rf"([\w:]+)\[{Timing().week}\]")
    read = {name for text in EXPRESSIONS.values() for name in week.findall(text)}

    assert read == {
        recorded.LAST_CHECKPOINT_HOURLY.name,
        recorded.CHECKPOINT_INTERVAL_HOURLY.name,
    }


def test_no_rule_selects_a_bucket_by_its_bound():
    # Prometheus 3 writes the bounds in another form than Prometheus 2.
    assert [name for name, text in EXPRESSIONS.items() if re.search(r"\ble\s*[=!]", text)] == []


# Alerts on ranks that export nothing, or no longer. They have cases in which a run ends in good
# order.
ON_SILENT_RANKS = {"ZerowatchCheckpointFailed", "ZerowatchRunDied", "ZerowatchTargetNeverUp"}


# A fault of the hardware ends the process, and its alert must outlast that.
@pytest.mark.parametrize("alert", [OF_RUNS[name] for name in OF_RUNS if name not in FAULTS])
def test_an_alert_is_restricted_to_runs_in_training(alert):
    restricted = re.search(rf"and on \(.*\) {RUN_ACTIVE.name} == 1$", alert.expression)

    assert bool(restricted) == (alert.name not in ON_SILENT_RANKS)


@each_alert
def test_the_summary_of_an_alert_has_no_values(alert):
    assert "$value" not in alert.summary
    assert ("{{ $labels.run }}" in alert.summary) == alert.about_run
    assert not alert.summary.endswith(".")


@each_alert
def test_an_alert_links_to_its_runbook_page_and_dashboard(alert):
    links = Links(runbook="https://wiki/runbook", grafana="https://grafana")

    annotations = alert.annotations(links)

    assert alert.dashboard in DASHBOARDS
    assert annotations["runbook_url"] == f"https://wiki/runbook#{alert.name.lower()}"
    variables = "?var-job={{$labels.job|urlquery}}&var-run={{$labels.run|urlquery}}"
    assert annotations["dashboard_url"] == (
        f"https://grafana/d/{alert.dashboard}" + (variables if alert.about_run else "")
    )


def test_the_shipped_rules_contain_no_address():
    assert "http" not in re.sub(r'mechanism=~"http', "", rule_files()[ALERTS])


def test_inhibited_alerts_exist():
    silenced = {
        name for alert in KNOWN.values() if alert.inhibits for name in alert.inhibits.alerts
    }

    assert silenced < KNOWN.keys()
    assert not {alert.name for alert in dcgm_alerts(Timing())} & KNOWN.keys()


def test_names_are_unique():
    assert len(KNOWN) == len(alerts(Timing()))


SECONDS = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "": 1}


def test_scaled_rules_differ_from_the_shipped_ones_in_durations_only():
    """Shipped and scaled files differ only in durations, and all of those by one factor."""
    shipped, hurried = rule_files(), rule_files(Timing(scale=1 / 30))

    assert shipped.keys() == hurried.keys()
    for name in shipped:
        assert without_numbers(shipped[name]) == without_numbers(hurried[name])
        changes = {
            (long, short)
            for long, short in zip(numbers(shipped[name]), numbers(hurried[name]), strict=True)
            if long != short
        }
        evaluation = {(15.0, 1.0)}  # not shorter than a second
        assert [
            each
            for each in changes - evaluation
            if each[0] != pytest.approx(30 * each[1], rel=0.01)
        ] == []
    assert "for: 4s" in hurried[ALERTS]
    assert "[10s]" in hurried[RECORDING]
    assert "interval: 1s" in hurried[ALERTS]


def numbers(text: str) -> list[float]:
    """Return all numbers of a text, durations in seconds."""
    found = re.findall(r"\b(\d+(?:\.\d+)?)(ms|s|m|h|d|)\b", text)
    return [float(number) * SECONDS[unit] for number, unit in found]


def without_numbers(text: str) -> str:
    return re.sub(r"\b\d+(\.\d+)?(ms|s|m|h|d|)\b", "NUMBER", re.sub(r"\s+", " ", text))


@pytest.mark.parametrize("name", rule_files())
def test_a_file_begins_with_a_note_that_it_is_generated(name):
    first = rule_files()[name].splitlines()[0]

    assert first.startswith("# Generated by `zerowatch dashboards build`")
    assert "edits here are lost" in first


def test_yaml_does_not_wrap_expressions():
    content = yaml.safe_load(rule_files()[ALERTS])
    written_as = {
        rule["alert"]: rule["expr"] for group in content["groups"] for rule in group["rules"]
    }

    assert written_as == {name: alert.expression for name, alert in KNOWN.items()}


def test_an_alert_without_inhibitions_has_no_inhibit_rule():
    quiet = [alert.name for alert in KNOWN.values() if alert.inhibits is None]
    config = yaml.safe_load(rule_files()["alertmanager/alertmanager.yml"])
    sources = {
        rule["source_matchers"][0] for rule in config["inhibit_rules"] if rule["equal"] != ["uuid"]
    }

    assert [name for name in quiet if f'alertname="{name}"' in sources] == []


def test_the_fields_of_dcgm_are_those_that_the_shipped_exporter_serves():
    counters = (ROOT / "docker/dcgm-exporter/counters.csv").read_text()
    fields = set(
        re.findall(r"DCGM_FI_\w+", rule_files()[DCGM].replace("DCGM_FI_DEV_XID_ERRORS:", ""))
    )

    assert len(fields) == 10
    assert [field for field in fields if f"{field}," not in counters] == []


def test_an_alert_from_dcgm_has_the_page_of_its_subject_and_is_inhibited_by_it():
    pairs = [(alert.page, alert.name) for alert in dcgm_alerts(Timing())]
    config = yaml.safe_load(rule_files()["alertmanager/alertmanager.yml"])
    by_uuid = [rule for rule in config["inhibit_rules"] if rule["equal"] == ["uuid"]]

    assert {page for page, _ in pairs} < KNOWN.keys()
    assert [(rule["source_matchers"], rule["target_matchers"]) for rule in by_uuid] == [
        ([f'alertname="{page}"'], [f'alertname=~"{name}"']) for page, name in pairs
    ]


@pytest.mark.parametrize("name", THRESHOLDS)
def test_each_threshold_is_compared_with_by_an_alert(name):
    assert any(f'name="{name}"' in expression for expression in EXPRESSIONS.values())
