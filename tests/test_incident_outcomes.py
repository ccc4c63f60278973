"""Tests of how the incident bench judges, keeps and chooses: `bench/incidents`."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.incidents import incident_results
from bench.incidents.hardware_incidents import ANSWERS, HARDWARE_INCIDENTS
from bench.incidents.incident_matrix import batches, selected, table
from bench.incidents.incident_outcome import BY_NAME, CONTRADICTIONS, FiredAlert, Outcome
from bench.incidents.planted_incidents import INCIDENTS

from zerowatch.dashboards.alerts import alerts
from zerowatch.dashboards.timing import Timing

SCALE = 1 / 15


def fired(name: str, seconds: float, node: str = "node-1", *, was_heard: bool = True) -> FiredAlert:
    alertname = f"Zerowatch{name}"
    return FiredAlert(
        labels={"alertname": alertname, "severity": "critical", "node": node},
        annotations={"runbook_url": f"http://example.org/page#{alertname.lower()}"},
        seconds=seconds,
        lasted_seconds=None,
        was_heard=was_heard,
    )


def outcome(name: str, *alerts: FiredAlert, failure: str = "") -> Outcome:
    planted = "2026-01-01 03:00 UTC"
    return Outcome(name=name, planted=planted, scale=SCALE, load=0.1, fired=alerts, failure=failure)


def test_the_expected_alert_in_time_with_its_host_is_right() -> None:
    result = outcome("hang-in-a-collective", fired("RankHung", 5.0))

    assert result.row().met
    assert "RankHung after 95 s" in result.row().measured  # 5 s x 15 and 20 s of group_wait


def test_an_alert_that_comes_too_late_is_wrong() -> None:
    assert not outcome("hang-in-a-collective", fired("RankHung", 11.0)).is_useful


def test_an_alert_that_names_another_host_is_wrong() -> None:
    assert not outcome("hang-in-a-collective", fired("RankHung", 5.0, "node-0")).is_useful


def test_an_alert_that_links_to_the_page_of_another_is_wrong() -> None:
    alert = fired("RankHung", 5.0)
    alert.annotations["runbook_url"] = "http://example.org/page#zerowatchrundied"

    assert not outcome("hang-in-a-collective", alert).is_useful


def test_an_alert_before_the_incident_is_false() -> None:
    alerts = fired("RankHung", -3.0), fired("RankHung", 5.0)

    assert outcome("hang-in-a-collective", *alerts).false_alerts == ["RankHung"]


def test_an_unrelated_alert_is_false_unless_another_inhibits_it() -> None:
    expected = fired("RankHung", 5.0)
    heard, muted = fired("LinkSlow", 6.0), fired("LinkSlow", 6.0, was_heard=False)

    assert not outcome("hang-in-a-collective", expected, heard).is_useful
    assert outcome("hang-in-a-collective", expected, muted).is_useful


def test_an_earlier_alert_is_shown_with_the_reason_and_the_goal_is_missed() -> None:
    row = outcome("rank-killed", fired("RankHung", 4.0, "node-0"), fired("RankVanished", 7.0)).row()

    assert row.met is False
    assert "first: RankHung after 80 s" in row.measured
    assert CONTRADICTIONS["rank-killed"] in row.spread


def test_any_alert_is_wrong_where_none_is_expected() -> None:
    assert outcome("normal-end").row().met
    assert not outcome("normal-end", fired("RunDied", 5.0)).row().met


def test_an_incident_that_was_not_planted_is_wrong() -> None:
    assert not outcome("normal-end", failure="rank 1 ended").row().met


def test_kept_outcomes_are_read_back_and_replaced_by_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    failed, right = outcome("loss-nan", failure="no engine"), outcome("normal-end")
    for each in (right, failed, outcome("loss-nan", fired("LossNotFinite", 2.0))):
        incident_results.keep(each, path)

    kept = incident_results.load(path)

    assert list(kept) == ["loss-nan", "normal-end"]
    assert kept["loss-nan"].is_useful
    assert kept["normal-end"] == right
    assert [row.measured for row in table(kept)][-1].startswith("2 of 2")


def test_results_of_another_version_are_an_error_before_anything_is_planted(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text('{"name": "loss-nan"}\n')

    with pytest.raises(ValueError, match="another version"):
        incident_results.load(path)


def test_every_incident_is_in_one_batch() -> None:
    names = [each.name for batch in batches(INCIDENTS) for each in batch]

    assert sorted(names) == sorted(each.name for each in INCIDENTS)


def test_incidents_are_selected_by_name_and_by_list() -> None:
    assert selected(("loss-nan", "hardware")) == [BY_NAME["loss-nan"], *HARDWARE_INCIDENTS]
    with pytest.raises(ValueError, match="normal-end"):
        selected(("normal_end",))


def test_every_alert_of_the_lists_exists() -> None:
    known = {alert.name.removeprefix("Zerowatch") for alert in alerts(Timing())}
    listed = {name for one in BY_NAME.values() for name in (one.alert, *one.also) if name}

    assert listed <= known


def test_every_fault_of_a_gpu_has_answers_of_nvml() -> None:
    assert set(ANSWERS) == {incident.name for incident in HARDWARE_INCIDENTS}
