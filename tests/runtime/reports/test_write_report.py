"""Tests of the report that the end of a run writes, and of the line that names it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest
from recorded_runs import write_run

from zerowatch.runtime.reports import write_report
from zerowatch.runtime.reports.write_report import final_report, make_report, report_line


def test_a_report_at_the_end_can_be_read_by_its_owner_only(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")

    report = final_report(folder, writes_page=True)

    assert report.page == folder / "report.html"
    assert stat.S_IMODE(report.page.stat().st_mode) == 0o600
    assert report.page.read_text() == make_report(folder)[1]
    assert report.summary is not None and report.summary.run_id == "run"


def test_a_summary_at_the_end_writes_no_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")

    report = final_report(folder, writes_page=False)

    assert report.page is None and not (folder / "report.html").exists()
    assert report.summary is not None and report.summary.figures["steps"] == 10


@pytest.mark.parametrize(("spare", "is_read"), [(0, True), (-1, False)])
def test_logs_of_more_than_the_limit_are_not_read_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spare: int, is_read: bool
) -> None:
    folder = write_run(tmp_path / "run")
    size = sum(path.stat().st_size for path in folder.glob("*.jsonl"))
    monkeypatch.setattr(write_report, "MAX_LOG_BYTES", size + spare)

    assert (final_report(folder, writes_page=False).summary is not None) is is_read


def test_the_limit_of_the_logs_is_128_mib() -> None:
    assert write_report.MAX_LOG_BYTES == 134_217_728


def test_a_folder_without_a_run_has_no_report_and_raises_nothing(tmp_path: Path) -> None:
    report = final_report(tmp_path / "none", writes_page=True)

    assert (report.summary, report.page) == (None, None)


@pytest.mark.parametrize("form", ["markdown", "json"])
def test_each_form_has_the_verdict_of_the_summary(tmp_path: Path, form: str) -> None:
    summary, text = make_report(write_run(tmp_path / "run"), form)  # type: ignore[arg-type]

    assert text.endswith("\n")
    if form == "json":
        assert json.loads(text)["verdict"] == summary.verdict
    else:
        assert f"**{summary.verdict}**" in text


def test_the_line_of_a_report_names_its_file_and_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "my runs" / "night"

    with_page, without = report_line(folder, folder / "report.html"), report_line(folder, None)

    command = "zerowatch report 'my runs/night'"
    assert without == f"report of this run: {command}"
    assert (
        with_page == f"report of this run: my runs/night/report.html; to make it again: {command}"
    )
