"""Tests of the runner of the controller: its stop file, and its end by an error."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.clock import FakeClock
from fakes.tuned_job import Job

from zerowatch.runtime.common.fail_open import LAST_RETRY_SECONDS, FailOpen
from zerowatch.runtime.tuner.controller_runner import ControllerRunner, StopFile


def test_a_stop_file_that_cannot_be_read_does_not_end_training(tmp_path: Path) -> None:
    stop_file = StopFile(tmp_path / ("long" * 100), SimpleNamespace(run_folder=tmp_path))
    runner = ControllerRunner(Job().controller, FailOpen(), stop_file)

    runner._poll_stop_file()

    assert stop_file.exists() is None
    assert not runner.needs_exchange


def test_a_controller_that_ran_short_of_disk_space_is_never_called_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, controller, calls = FakeClock(), Job().controller, []

    def run_short() -> None:
        calls.append(clock.seconds)
        raise OSError(errno.ENOSPC, "No space left on device")

    stop_file = StopFile(tmp_path / "stop", SimpleNamespace(run_folder=tmp_path))
    runner = ControllerRunner(controller, FailOpen(now=clock), stop_file)
    monkeypatch.setattr(controller, "on_user_change", run_short)

    runner.on_user_change()
    clock.seconds += 10 * LAST_RETRY_SECONDS  # it has missed what happened meanwhile
    runner.on_user_change()

    assert len(calls) == 1
