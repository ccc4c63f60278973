"""Tests of the end of a run: its report, and the line that makes it.

Covers `final_report.py`, and `final_report` of `runtime/reports/write_report.py`.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from pathlib import Path

import pytest
from recorded_runs import write_run

from zerowatch.runtime.monitor.final_report import announce_report
from zerowatch.runtime.reports import write_report


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run(tmp_path / "runs" / "night run")


def announced(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_the_line_is_the_command_that_makes_the_report(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        announce_report(folder, is_ours=False, console="lines")

    assert announced(caplog) == ["report of this run: zerowatch report 'runs/night run'"]
    assert not (folder / "report.html").exists()


def test_a_written_report_is_named_too(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        announce_report(folder, is_ours=True, console="lines")

    (line,) = announced(caplog)
    assert "runs/night run/report.html" in line and "zerowatch report 'runs/night run'" in line
    assert "Nothing holds this run back" in (folder / "report.html").read_text()
    assert stat.S_IMODE((folder / "report.html").stat().st_mode) == 0o600  # has error reports


def test_a_run_without_a_step_has_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        announce_report(tmp_path, is_ours=True, console="lines")

    assert announced(caplog) == []


def test_a_long_log_is_not_read_at_the_end_of_training(folder: Path) -> None:
    os.truncate(folder / "rank-1.jsonl", write_report.MAX_LOG_BYTES + 1)

    found = write_report.final_report(folder, writes_page=True)

    assert (found.summary, found.page) == (None, None)
    assert not (folder / "report.html").exists()


def test_a_file_system_that_does_not_answer_delays_the_end_for_a_limited_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    monkeypatch.setattr(write_report, "MAX_SECONDS", 0.1)
    monkeypatch.setattr(write_report, "make_report", lambda folder: answered.wait(60))

    found = write_report.final_report(folder, writes_page=True)

    assert (found.summary, found.page) == (None, None)

    answered.set()


def test_an_error_in_the_report_does_not_reach_training(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(folder: Path) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(write_report, "make_report", fail)

    announce_report(folder, is_ours=True, console="lines")

    assert "training goes on" in caplog.text


def test_a_folder_that_cannot_be_written_gives_the_line_only(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path, text: str, *, mode: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write_report, "atomic_write", fail)

    with caplog.at_level(logging.INFO):
        announce_report(folder, is_ours=True, console="lines")

    assert announced(caplog) == ["report of this run: zerowatch report 'runs/night run'"]
