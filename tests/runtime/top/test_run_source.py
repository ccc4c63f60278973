"""Tests of the choice of a run, its run folder, and alerts of Prometheus.

Covers `run_source.py`, `recorded_run.py` and `prometheus_alerts.py`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from closed_folders import refuse_below
from live_runs import RUN_ID
from recorded_metrics import RecordedRank
from recorded_runs import STARTED, step_record, write_run
from served_ranks import two_ranks
from uneven_runs import eventful_run

from zerowatch.errors import CommandLineError
from zerowatch.metrics.catalog import communication, memory, training, tuner
from zerowatch.metrics.thresholds import STRAGGLER_SCORE_HIGH
from zerowatch.runtime.reports.run_reader import RunFolderError
from zerowatch.runtime.reports.run_summary import summary_of
from zerowatch.runtime.top.http_client import Access, HttpClient, NoAnswerError, Page
from zerowatch.runtime.top.prometheus_alerts import prometheus_alerts
from zerowatch.runtime.top.recorded_run import RecordedRun, recorded_view
from zerowatch.runtime.top.run_source import (
    RunFolder,
    ServedRun,
    WithAlerts,
    newest_run,
    open_source,
    targets_url,
)
from zerowatch.runtime.top.run_view import AlertView


def refuse(url: str) -> Page:
    raise NoAnswerError("connection refused")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run of two ranks with its metrics log."""
    folder = write_run(
        tmp_path / "runs" / "night",
        steps=40,
        record=lambda rank, step: step_record(step, comm_exposed_seconds=0.1),
    )
    for number in range(2):
        with RecordedRank(folder, number) as rank:
            recorder = rank.recorder
            recorder.set(training.WORLD_SIZE, 2)
            recorder.add(training.STEPS, 40)
            for phase, seconds in {"forward": 4.0, "backward": 12.0, "optimizer": 4.0}.items():
                recorder.add(training.PHASE_SECONDS, seconds, phase)
            recorder.add(communication.COMM_EXPOSED_SECONDS, 4.0, "dp")
            recorder.add(communication.COMM_CAUSE_SECONDS, 3.0, "imbalance")
            recorder.set(communication.STRAGGLER_SCORE, 0.2 * number, "forward")
            recorder.set(memory.MEMORY_LIMIT, 2e9, "cpu")
            recorder.set(memory.MEMORY_CATEGORY_BYTES, 5e7, "cpu", "parameters")
            recorder.set(tuner.TUNER_STATE, 1, "observe")
            recorder.set(training.RUN_ACTIVE, 0)
            recorder.set_info(training.RUN_END_INFO, "completed")
            rank.tick()
    return folder


def test_a_finished_run_shows_the_figures_of_its_report(folder: Path) -> None:
    view = RunFolder(folder, refuse).read()

    assert (view.run_id, view.status, view.is_live) == ("night", "completed", False)
    assert view.period == "whole run"
    assert view.at == pytest.approx(STARTED + 20)
    assert {share.name: round(share.ratio, 3) for share in view.phases}["backward"] == 0.6
    assert view.exposed is not None and view.exposed.ratio == pytest.approx(0.2, rel=1e-3)
    assert view.causes[0].name == "imbalance"
    assert [rank.steps for rank in view.ranks] == [40, 40]
    assert (view.ranks[1].straggler_phase, view.ranks[1].straggler_score) == ("forward", 0.2)
    assert view.memory[0].categories["parameters"] == 5e7
    assert view.tuner.state == "observe"
    assert view.verdict


def test_a_run_without_a_metrics_log_says_what_is_missing(tmp_path: Path) -> None:
    view = RunFolder(write_run(tmp_path / "run"), refuse).read()

    assert view.causes == []
    assert any("metrics log" in note for note in view.notes)


def test_a_folder_is_read_again_only_after_it_was_written_to(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = RecordedRun(folder)
    first = recorded.read()

    assert recorded.read() is first

    monkeypatch.setattr("zerowatch.runtime.top.recorded_run.READ_SECONDS", 0.0)
    recorded = RecordedRun(folder)
    recorded.read()
    recorded._next_read = 0.0
    os.utime(folder / "rank-0.jsonl", (STARTED + 9e6, STARTED + 9e6))
    assert recorded.read() is not first


def test_ranks_of_an_active_run_are_scraped_as_its_folder_lists_them(tmp_path: Path) -> None:
    folder = write_run(tmp_path / RUN_ID)
    with two_ranks() as ranks:
        (folder / "targets.json").write_text(json.dumps(ranks[0].targets()))
        source = RunFolder(folder, HttpClient(Access()).get)

        live = source.read()
        (folder / "targets.json").write_text("[]\n")
        ended = source.read()

    assert live.is_live and live.status == "training"
    assert not ended.is_live and ended.status == "completed"


def test_the_logs_are_shown_while_no_listed_rank_answers(tmp_path: Path) -> None:
    folder = write_run(tmp_path / RUN_ID)
    with two_ranks() as ranks:
        (folder / "targets.json").write_text(json.dumps(ranks[0].targets()))

    view = RunFolder(folder, HttpClient(Access()).get).read()

    assert not view.is_live
    assert len(view.ranks) == 2
    assert "no rank answers" in view.notes[0] and "refused" in view.notes[0]


def test_an_empty_folder_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError):
        RunFolder(tmp_path, refuse).read()


def test_without_an_argument_the_run_written_last_is_chosen(tmp_path: Path) -> None:
    for seconds, name in ((100, "a-late"), (50, "b-early")):
        folder = write_run(tmp_path / name)
        for path in (*folder.iterdir(), folder):
            os.utime(path, (STARTED + seconds, STARTED + seconds))
    (tmp_path / "no-run").mkdir()

    assert newest_run(tmp_path).name == "a-late"
    view = open_source(None, runs=tmp_path, get=refuse).read()
    assert view.run_id == "a-late"


def test_a_folder_that_cannot_be_searched_hides_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "mine")
    closed = write_run(tmp_path / "closed")
    refuse_below(monkeypatch, closed)

    assert newest_run(tmp_path).name == "mine"
    with pytest.raises(CommandLineError, match="no run below"):
        open_source(str(closed), runs=tmp_path, get=refuse)


def test_a_report_of_an_earlier_run_does_not_make_it_the_newest(tmp_path: Path) -> None:
    for seconds, name in ((50, "earlier"), (100, "newest")):
        folder = write_run(tmp_path / name)
        for path in folder.iterdir():
            os.utime(path, (STARTED + seconds, STARTED + seconds))

    for name in ("report.html", "compare.html"):
        (tmp_path / "earlier" / name).write_text("")
    os.utime(tmp_path / "earlier", (STARTED + 200, STARTED + 200))
    os.utime(tmp_path / "newest", (STARTED + 100, STARTED + 100))

    assert newest_run(tmp_path).name == "newest"


def test_a_run_without_logs_is_as_old_as_its_folder(tmp_path: Path) -> None:
    for seconds, name in ((100, "a-late"), (50, "b-early")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings.json").write_text("{}")
        os.utime(tmp_path / name, (STARTED + seconds, STARTED + seconds))

    assert newest_run(tmp_path).name == "a-late"


def test_a_missing_run_is_an_error_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(CommandLineError, match=r"no run below .*none"):
        open_source(None, runs=tmp_path / "none", get=refuse)
    with pytest.raises(CommandLineError, match="gone is no folder and no address"):
        open_source("gone", runs=tmp_path, get=refuse)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("node-0:9464", "http://node-0:9464/targets"),
        ("[::1]:9464", "http://[::1]:9464/targets"),
        ("https://node-0:9464/", "https://node-0:9464/targets"),
        ("http://node-0:9463/targets", "http://node-0:9463/targets"),
        ("http://proxy/user/job/targets", "http://proxy/user/job/targets"),
        ("runs/night", None),
        ("http://[::1", None),
        ("file:///etc/passwd", None),
    ],
)
def test_an_address_is_completed(given: str, expected: str | None) -> None:
    assert targets_url(given) == expected


def listing(*runs: str) -> bytes:
    return json.dumps(
        [{"targets": ["127.0.0.1:9"], "labels": {"run": run, "rank": "0"}} for run in runs]
    ).encode()


def serve(targets: bytes) -> ServedRun:
    return ServedRun("http://host:9463/targets", lambda url: _page(url, targets))


def _page(url: str, targets: bytes) -> Page:
    if url.endswith("/targets"):
        return Page(targets)
    return Page(b'zerowatch_run_active{rank="0"} 1.0\n')


def test_of_several_runs_the_newest_is_shown_and_the_others_are_named() -> None:
    view = serve(listing("20260101-a", "20260202-b")).read()

    assert view.run_id == "20260202-b"
    assert view.notes == ["other runs, for --run: 20260101-a"]


def test_a_run_is_chosen_by_its_id_or_refused() -> None:
    page = listing("a", "b")

    chosen = ServedRun("http://h/targets", lambda url: _page(url, page), "a").read()

    assert chosen.run_id == "a"
    with pytest.raises(CommandLineError, match=r"no run c at .*lists a, b"):
        ServedRun("http://h/targets", lambda url: _page(url, page), "c").read()


@pytest.mark.parametrize(
    ("given", "listed", "shown"),
    [
        (None, ["20260202T000000-b"], "20260202T000000-b"),
        (None, ["20260202T000000-b", "20260303T000000-c"], "20260202T000000-b"),
        (None, [], "20260202T000000-b"),
        (None, ["20260101T000000-a", "20260303T000000-c"], "20260303T000000-c"),
        (None, ["20260101T000000-a", "20260102T000000-b"], "20260202T000000-b"),
        (None, ["20260101T000000-a"], "20260202T000000-b"),
        ("20260202T000000-b", ["20260303T000000-c"], "20260202T000000-b"),
    ],
)
def test_a_later_run_at_the_address_is_shown_once_the_run_is_not_listed(
    given: str | None, listed: list[str], shown: str
) -> None:
    pages = [listing("20260202T000000-b"), listing(*listed)]
    source = ServedRun("http://h/targets", lambda url: _page(url, pages[0]), given)

    first = source.read()
    del pages[0]

    assert (first.run_id, source.read().run_id) == ("20260202T000000-b", shown)


@pytest.mark.parametrize(
    ("first", "second", "third", "shown"),
    [
        (["pretrain-9999"], ["pretrain-9999"], ["pretrain-10000"], "pretrain-10000"),
        (["pretrain-1234"], ["pretrain-1234"], ["finetune-1235"], "finetune-1235"),
        (["20260202T000000-b"], ["20260202T000000-b"], ["eval-1"], "eval-1"),
        (["b"], ["b", "a"], ["a"], "a"),  # began during the first run
        (["b"], ["b"], [], "b"),
        (["a"], ["a", "c"], ["b", "c"], "b"),  # the latest
        (["a"], ["b", "c"], ["a", "b"], "c"),  # none began after c
        (["a", "z"], ["z"], ["a"], "z"),
        (["m"], ["n"], ["z", "m"], "z"),
        (["m"], ["n"], ["m"], "n"),
    ],
)
def test_a_run_that_was_listed_after_another_is_later_whatever_its_id(
    first: list[str], second: list[str], third: list[str], shown: str
) -> None:
    pages = [listing(*first), listing(*second), listing(*third)]
    source = ServedRun("http://h/targets", lambda url: _page(url, pages[0]))

    for _ in range(2):
        source.read()
        del pages[0]

    assert source.read().run_id == shown


@pytest.mark.parametrize("page", [b"<html>", b"{}", b"[1]", b'[{"targets": ["x"]}]', b"null"])
def test_a_page_that_lists_no_targets_is_refused(page: bytes) -> None:
    with pytest.raises(NoAnswerError, match="lists no targets"):
        serve(page).read()


ALERTS = {
    "data": {
        "alerts": [
            {
                "labels": {"alertname": "ZerowatchDataBound", "run": RUN_ID, "severity": "info"},
                "annotations": {"summary": "loads data"},
                "state": "pending",
            },
            {
                "labels": {
                    "alertname": "ZerowatchStragglerRank",
                    "run": RUN_ID,
                    "severity": "warning",
                    "rank": "3",
                },
                "annotations": {"summary": "slow in backward"},
                "state": "firing",
            },
            {"labels": {"alertname": "Other", "run": "another"}, "state": "firing"},
            {"labels": {"alertname": "Watchdog"}, "state": "firing"},
        ]
    }
}


def test_the_alerts_of_the_run_are_taken_from_prometheus() -> None:
    asked: list[str] = []

    def get(url: str) -> Page:
        asked.append(url)
        return Page(json.dumps(ALERTS).encode())

    firing, pending = prometheus_alerts(get, "http://prometheus:9090/", RUN_ID)

    assert asked == ["http://prometheus:9090/api/v1/alerts"]
    assert (firing.name, firing.text) == ("ZerowatchStragglerRank", "rank 3: slow in backward")
    assert not firing.is_pending and pending.is_pending


def test_alerts_of_prometheus_replace_the_own_signals() -> None:
    with two_ranks() as ranks:
        source = ServedRun(ranks[0].targets_url, HttpClient(Access()).get)
        page = Page(json.dumps(ALERTS).encode())
        view = WithAlerts(source, "http://p:9090", lambda url: page).read()

    assert view.alerts_source == "Prometheus"
    assert [alert.severity for alert in view.alerts] == ["warning", "info"]


def test_own_signals_remain_while_prometheus_does_not_answer() -> None:
    with two_ranks() as ranks:
        source = ServedRun(ranks[0].targets_url, HttpClient(Access()).get)
        view = WithAlerts(source, "http://p:9090", refuse).read()

    assert view.alerts_source == "the ranks' own signals"
    assert view.notes[0] == "Prometheus at http://p:9090: connection refused"


def test_another_program_at_the_address_of_prometheus_is_no_answer() -> None:
    with pytest.raises(NoAnswerError, match="not that of Prometheus"):
        prometheus_alerts(lambda url: Page(b"[]"), "http://p", RUN_ID)


def rounded(value: object) -> object:
    """The same value, with numbers of six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if abs(value) < 1e9 else value
    if isinstance(value, Mapping):
        return {name: rounded(each) for name, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


def test_the_view_of_a_recorded_run_has_the_figures_of_its_report(tmp_path: Path) -> None:
    """The figures are computed by hand in `test_run_summary.py`."""
    summary = summary_of(eventful_run(tmp_path / "run"))

    view = recorded_view(replace(summary, folder="runs/night"), at=7.0)

    text = json.dumps(rounded(asdict(view)), indent=1, ensure_ascii=False)
    assert f"{text}\n" == (Path(__file__).parent / "expected/recorded_view.txt").read_text()


@pytest.mark.parametrize(
    ("number", "notes"), [(5, list("abcde")), (7, [*"abcde", "2 more problems"])]
)
def test_only_five_problems_of_a_recorded_run_are_notes(
    tmp_path: Path, number: int, notes: list[str]
) -> None:
    summary = summary_of(write_run(tmp_path / "run"))

    view = recorded_view(replace(summary, problems=tuple("abcdefg"[:number])), at=7.0)

    assert view.notes == notes


@pytest.mark.parametrize(
    ("alerts", "threshold"),
    [({}, float(STRAGGLER_SCORE_HIGH)), ({"thresholds": {"straggler_score_high": 0.2}}, 0.2)],
)
def test_the_threshold_of_a_recorded_run_is_its_own(
    tmp_path: Path, alerts: dict[str, object], threshold: float
) -> None:
    folder = write_run(tmp_path / "run", settings={"alerts": alerts})

    assert recorded_view(summary_of(folder), at=7.0).straggler_threshold == threshold


def test_a_run_without_steps_is_as_old_as_its_last_write(tmp_path: Path) -> None:
    (tmp_path / "settings.json").write_text("{}")

    view = recorded_view(summary_of(tmp_path), at=7.0)

    assert (view.at, view.phases, view.exposed, view.causes) == (7.0, [], None, [])


def alert(name: str, state: str = "firing", **labels: str) -> dict[str, object]:
    return {
        "labels": {"alertname": name, "run": "night", **labels},
        "annotations": {"summary": f"Rank 3 of {name}", "description": "long"},
        "state": state,
    }


def alerts_of(*alerts: dict[str, object]) -> list[AlertView]:
    asked: list[str] = []

    def get(url: str) -> Page:
        asked.append(url)
        return Page(json.dumps({"data": {"alerts": list(alerts)}}).encode())

    found = prometheus_alerts(get, "http://prometheus:9090/", "night")
    assert asked == ["http://prometheus:9090/api/v1/alerts"]
    return found


def test_alerts_of_the_run_are_sorted_by_state_severity_and_name() -> None:
    found = alerts_of(
        alert("d", "pending", severity="critical"),
        alert("c", severity="info"),
        alert("b", severity="page"),
        alert("a", severity="warning"),
        alert("e", severity="critical"),
        {**alert("f"), "labels": {"alertname": "f", "run": "another"}},
    )

    assert [(each.name, each.severity, each.is_pending) for each in found] == [
        ("e", "critical", False),
        ("a", "warning", False),
        ("b", "warning", False),
        ("c", "info", False),
        ("d", "critical", True),
    ]


@pytest.mark.parametrize(
    ("annotations", "rank", "text"),
    [
        ({"summary": "Rank 3 is slow", "description": "long"}, "3", "Rank 3 is slow"),
        ({"description": "is slow"}, "3", "rank 3: is slow"),
        ({"summary": "is slow"}, None, "is slow"),
        ({}, "3", "rank 3: "),
    ],
)
def test_the_text_of_an_alert_names_its_rank_once(
    annotations: dict[str, str], rank: str | None, text: str
) -> None:
    labels = {} if rank is None else {"rank": rank}

    [found] = alerts_of({**alert("a", **labels), "annotations": annotations})

    assert found.text == text
