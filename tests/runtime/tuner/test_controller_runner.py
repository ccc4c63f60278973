"""The runner of the controller: its stop file."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from fakes.tuned_job import Job

from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.tuner.controller_runner import ControllerRunner, StopFile


def test_a_stop_file_that_cannot_be_read_does_not_end_training(tmp_path: Path) -> None:
    stop_file = StopFile(tmp_path / ("long" * 100), SimpleNamespace(run_folder=tmp_path))
    runner = ControllerRunner(Job().controller, FailOpen(), stop_file)

    runner._poll_stop_file()

    assert stop_file.exists() is None
    assert not runner.needs_exchange
