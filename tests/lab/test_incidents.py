"""Tests of alerts from the incident to the message of Alertmanager, on real training jobs.

Four incidents of `make bench ARGS=incidents`: two hosts for each run, a real Prometheus and a real
Alertmanager, the shipped rules with ranges and waits a fifteenth as long. How soon an alert comes
depends on the load of the machine, and is measured by the bench.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from bench.incidents.incident_matrix import Waits, outcomes_of, selected
from bench.incidents.incident_outcome import Outcome
from lab.alerting import RUNBOOK
from lab.two_hosts import missing
from require import program

from zerowatch.dashboards.timing import MINUTE

REASON = missing()
pytestmark = [
    pytest.mark.jobs,
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]

HANG, KILLED, NAN, END = "hang-in-a-collective", "rank-killed", "loss-nan", "normal-end"
RAISED = {HANG: "RankHung", KILLED: "RankVanished", NAN: "LossNotFinite"}
# In time of the rules, of which 15 minutes are a minute here. No alert of these needs a past.
WAITS = Waits(usual=5 * MINUTE, patience=20 * MINUTE, afterwards=5 * MINUTE)

Outcomes = Mapping[str, Outcome]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    program("prometheus", apt="prometheus")
    program("prometheus-alertmanager", apt="prometheus-alertmanager")
    return {outcome.name: outcome for outcome in outcomes_of(selected((*RAISED, END)), WAITS)}


@pytest.mark.parametrize("incident", RAISED)
def test_an_incident_raises_its_alert(outcomes: Outcomes, incident: str) -> None:
    outcome = outcomes[incident]

    assert outcome.expected is not None, outcome
    assert outcome.expected.name == RAISED[incident]


@pytest.mark.parametrize("incident", [HANG, KILLED])
def test_an_alert_about_a_rank_names_its_host(outcomes: Outcomes, incident: str) -> None:
    assert "node-1" in outcomes[incident].hosts


@pytest.mark.parametrize("incident", RAISED)
def test_an_alert_says_where_how_much_and_what_to_read(outcomes: Outcomes, incident: str) -> None:
    alert = outcomes[incident].expected

    assert alert is not None
    assert alert.has_page
    assert alert.labels["job"] == "zerowatch"
    assert alert.labels["run"] == incident
    assert alert.labels["severity"] == "critical"
    assert alert.annotations["runbook_url"].startswith(f"{RUNBOOK}#")
    assert f"var-run={incident}" in alert.annotations["dashboard_url"]
    assert incident in alert.annotations["summary"]
    assert alert.annotations["description"]


@pytest.mark.parametrize("incident", RAISED)
def test_the_receiver_gets_a_message_about_the_alert(outcomes: Outcomes, incident: str) -> None:
    wanted = f"FIRING critical Zerowatch{RAISED[incident]} "

    assert any(wanted in line for line in outcomes[incident].messages)


def test_an_alert_and_its_message_end_with_the_incident(outcomes: Outcomes) -> None:
    assert outcomes[HANG].ended_seconds is not None
    assert any("RESOLVED critical ZerowatchRankHung " in line for line in outcomes[HANG].messages)


def test_a_normal_end_raises_no_alert(outcomes: Outcomes) -> None:
    assert outcomes[END].failure == ""
    assert outcomes[END].first == []


def test_no_other_alert_is_raised_about_a_rank_or_a_run(outcomes: Outcomes) -> None:
    about_life = {"RunDied", "RankVanished", "RankHung", "TrainingStalled", "NoFirstStep"}

    assert not about_life & set(outcomes[NAN].false_alerts)
