"""Tests that event files of TensorBoard have the values, steps and times that were written."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerowatch.errors import SettingsError
from zerowatch.runtime.sinks.sink import SinkRun
from zerowatch.runtime.sinks.tensorboard_sink import TensorboardSink

pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
from tensorboard.backend.event_processing.event_accumulator import (
    EventAccumulator,
)


def test_the_run_folder_gets_the_event_file_with_steps_and_times(tmp_path: Path) -> None:
    sink = TensorboardSink()

    sink.open(SinkRun(run_id="r", folder=tmp_path))
    sink.write({"zerowatch/loss": 2.5}, step=3, unix_seconds=1000.0)
    sink.write({"zerowatch/loss": 1.5}, step=4, unix_seconds=1001.0)
    sink.close(failed=False)

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    scalars = [(each.step, each.value, each.wall_time) for each in events.Scalars("zerowatch/loss")]
    assert scalars == [(3, 2.5, 1000.0), (4, 1.5, 1001.0)]


def test_without_any_folder_the_error_names_the_setting() -> None:
    with pytest.raises(SettingsError, match=r"sinks\.tensorboard_folder"):
        TensorboardSink().open(SinkRun(run_id="r", folder=None))
