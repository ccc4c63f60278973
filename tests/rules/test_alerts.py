"""Each alert fires at the expected evaluation and resolves, and does not fire otherwise."""

from __future__ import annotations

import pytest
from rules.cases import (
    communication,
    dcgm,
    hardware,
    liveness,
    memory,
    numerics,
    overhead,
    prometheus,
    reviewed,
    thresholds,
    training,
    window,
)
from rules.promtool import WATCHDOG, Case, failures, needed_rules, seconds, written

from zerowatch.dashboards.alerts import alerts
from zerowatch.dashboards.alerts.dcgm import dcgm_alerts
from zerowatch.dashboards.prometheus_files import rule_files
from zerowatch.dashboards.timing import Timing

# The cases by the components whose alerts they are about. All rules take four times as long.
# Most cases are about one alert and have only that one; the slow tests check that no other fires.
BY_COMPONENTS = {
    ("communication",): communication.CASES,
    ("training",): (*liveness.CASES, *numerics.CASES),
    ("training", "devices"): training.CASES,
    ("memory",): memory.CASES,
    ("memory", "training"): window.CASES,
    ("watch", "tuner"): (*overhead.CASES, *thresholds.CASES),
    ("prometheus",): prometheus.CASES,
}
CASES = tuple(case for cases in BY_COMPONENTS.values() for case in cases)
HARDWARE = (*hardware.CASES, *dcgm.CASES)
# Longer histories belong to make test-all: promtool's time grows with them.
LONG_SECONDS = 20 * 60
OF_NAME = {alert.name: alert for alert in (*alerts(Timing()), *dcgm_alerts(Timing()))}
NAMES = list(OF_NAME)


def marks(case: Case) -> list[pytest.MarkDecorator]:
    """Return the marker of long histories, but for the first of each alert and a normal end."""
    same = [each for each in (*CASES, *HARDWARE) if each.alert.get("alertname")]
    first = {each.alert["alertname"]: each for each in reversed(same)}
    must_run = (
        case is first.get(case.alert.get("alertname", "")) or case is liveness.NORMAL_ENDS[-1]
    )
    is_long = seconds(case.recovers_at or case.until) > LONG_SECONDS
    return [pytest.mark.slow] if is_long and not must_run else []


@pytest.mark.parametrize(
    ("components", "case"),
    [
        pytest.param(components, case, id=case.title, marks=marks(case))
        for components, cases in BY_COMPONENTS.items()
        for case in cases
    ],
)
def test_alerts(components, case, some_rules, tmp_path):
    rules = some_rules(*components, only=case.about)

    assert failures(rules, [case.test()], tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_no_other_alert_fires(case, alert_rules, tmp_path):
    assert failures(alert_rules, [case.test()], tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("case", HARDWARE, ids=lambda case: case.title)
def test_no_other_alert_fires_on_hardware(case, some_rules, tmp_path):
    assert failures(some_rules("devices"), [case.test()], tmp_path) == ""


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.title, marks=marks(case)) for case in HARDWARE]
)
def test_alerts_on_hardware(case, some_rules, tmp_path):
    rules = some_rules("devices", only=case.about)

    assert failures(rules, [case.test()], tmp_path) == ""


# Here an hour is a minute long.
@pytest.mark.parametrize(
    ("saves_each", "ends", "fires_at", "until"),
    [(1, 5, "9m30s", 36), (12, 37, "74m30s", 90)],
)
def test_an_overdue_checkpoint_stays_overdue_if_a_restarted_run_saves_none(
    saves_each, ends, fires_at, until, tmp_path
):
    files = rule_files(Timing(scale=1 / 60))
    rules = written(needed_rules(files, only=training.OVERDUE["alertname"]), tmp_path)
    case = training.restarted(saves_each, ends, fires_at, until)

    assert failures(rules, [case.test()], tmp_path) == ""


def test_a_run_that_always_ends_before_its_next_checkpoint_is_overdue(some_rules, tmp_path):
    case = next(case for case in training.CASES if case.series == training.failing(pause=1))

    assert failures(some_rules(only=case.about), [case.test()], tmp_path) == ""


def test_a_checkpoint_that_failed_at_the_end_of_a_run_is_an_alert_after_a_single_scrape(
    some_rules, tmp_path
):
    """It is between two evaluations, and so is the next scrape, which fails."""
    case = training.FAILED_AT_THE_END

    assert failures(some_rules(only=case.about), [case.test()], tmp_path) == ""


@pytest.mark.slow
def test_such_a_run_is_overdue_after_pauses_of_more_than_an_hour_too(some_rules, tmp_path):
    case = training.LONG_PAUSES

    assert failures(some_rules(only=case.about), [case.test()], tmp_path) == ""


@pytest.mark.slow
def test_no_checkpoint_is_overdue_if_rank_0_saves_but_is_not_read(some_rules, tmp_path):
    case = training.RANK_0_UNREAD

    assert failures(some_rules(only=case.about), [case.test()], tmp_path) == ""


def test_the_watchdog_fires_without_any_series(alert_rules, tmp_path):
    always = {
        "interval": "1m",
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{WATCHDOG}", severity="none"}})',
                "eval_time": moment,
                "exp_samples": [{"labels": "{}", "value": 1}],
            }
            for moment in ("0m", "30m")
        ],
    }

    assert failures(alert_rules, [always], tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("scenario", reviewed.SCENARIOS, ids=lambda each: each.title)
def test_scenarios(scenario, rules, alert_rules, tmp_path):
    used = rules if scenario.records else alert_rules

    assert failures(used, [scenario.test()], tmp_path) == ""


def test_an_alert_that_comes_close_exists():
    assert {case.near for case in (*CASES, *HARDWARE)} <= {"", *NAMES}


@pytest.mark.parametrize("name", [name for name in NAMES if name != WATCHDOG])
def test_each_alert_has_a_case_in_which_it_fires_and_resolves(name):
    fired = [case for case in (*CASES, *HARDWARE) if case.alert.get("alertname") == name]

    assert fired and all(case.recovers_at for case in fired)


@pytest.mark.parametrize(
    "case", [case for case in (*CASES, *HARDWARE) if case.alert], ids=lambda case: case.title
)
def test_firing_alerts_have_their_severity_and_component(case):
    alert = OF_NAME[case.alert["alertname"]]

    assert case.alert.items() >= alert.labels.items()


def test_a_case_that_expects_the_wrong_minute_fails(alert_rules, tmp_path):
    test = overhead.CASES[2].test()
    fires = next(look for look in test["promql_expr_test"] if look["exp_samples"])
    fires["eval_time"] = "3m"

    assert "FAILED" in failures(alert_rules, [test], tmp_path)
