"""Tests of the attempts of a run, which its folder keeps over restarts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from zerowatch.runtime.monitor.run_attempts import ATTEMPTS_FILE, RunStart, begin_attempt


def test_the_first_attempt_starts_the_run(tmp_path: Path) -> None:
    start = begin_attempt(tmp_path / "night-7", restarts=0, now=lambda: 100.0)

    assert start == RunStart(unix_seconds=100.0, earlier_attempts=0)


def test_later_attempts_know_when_the_run_started(tmp_path: Path) -> None:
    for began in (100.0, 200.0):
        begin_attempt(tmp_path, restarts=0, now=lambda began=began: began)

    start = begin_attempt(tmp_path, restarts=1, now=lambda: 300.0)

    assert start == RunStart(unix_seconds=100.0, earlier_attempts=2)


def test_without_a_folder_only_the_launcher_counts() -> None:
    start = begin_attempt(None, restarts=3, now=lambda: 100.0)

    assert start == RunStart(unix_seconds=100.0, earlier_attempts=3)


def test_a_line_that_a_kill_has_cut_is_ignored(tmp_path: Path) -> None:
    begin_attempt(tmp_path, restarts=0, now=lambda: 100.0)
    with (tmp_path / ATTEMPTS_FILE).open("a") as file:
        file.write('{"started_at_un\n[]\n')

    start = begin_attempt(tmp_path, restarts=0, now=lambda: 300.0)

    assert start == RunStart(unix_seconds=100.0, earlier_attempts=1)


def test_an_attempt_after_a_cut_line_is_counted(tmp_path: Path) -> None:
    begin_attempt(tmp_path, restarts=0, now=lambda: 100.0)
    with (tmp_path / ATTEMPTS_FILE).open("a") as file:
        file.write('{"started_at_un')
    begin_attempt(tmp_path, restarts=0, now=lambda: 200.0)

    start = begin_attempt(tmp_path, restarts=0, now=lambda: 300.0)

    assert start == RunStart(unix_seconds=100.0, earlier_attempts=2)


def test_a_folder_that_cannot_be_written_is_logged_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()

    with caplog.at_level(logging.WARNING):
        start = begin_attempt(tmp_path / "file" / "run", restarts=1, now=lambda: 100.0)

    assert start == RunStart(unix_seconds=100.0, earlier_attempts=1)
    assert ATTEMPTS_FILE in caplog.text


def test_a_start_survives_the_way_over_the_store() -> None:
    start = RunStart(unix_seconds=1700000000.123456, earlier_attempts=2)

    assert RunStart.from_text(start.to_text()) == start
