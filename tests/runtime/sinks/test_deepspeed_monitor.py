"""Tests that values go where DeepSpeed's own monitors write, in their form and with their x-axis.

The monitors themselves run in `tests/examples/`.
"""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerowatch.runtime.sinks.deepspeed_monitor import deepspeed_sinks
from zerowatch.runtime.sinks.sink import Sink, SinkRun
from zerowatch.runtime.sinks.wandb_sink import WandbSink

pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
from tensorboard.backend.event_processing.event_accumulator import (
    EventAccumulator,
)
from torch.utils.tensorboard import SummaryWriter

BATCH_SIZE = 8


def sinks_of(**monitors: object) -> dict[str, Sink]:
    """Return the sinks of an engine with these monitors; the others are None, as in DeepSpeed."""
    none = {"tb_monitor": None, "wandb_monitor": None, "csv_monitor": None}
    engine: Any = SimpleNamespace(
        monitor=SimpleNamespace(**(none | monitors)), train_batch_size=lambda: BATCH_SIZE
    )
    return dict(deepspeed_sinks(lambda: engine))


def test_a_ds_config_without_monitors_has_no_sinks() -> None:
    assert sinks_of() == {}


def test_the_csv_files_have_deepspeeds_form_and_count_samples(tmp_path: Path) -> None:
    sink = sinks_of(csv_monitor=SimpleNamespace(log_dir=str(tmp_path)))["csv"]

    sink.open(SinkRun(run_id="r", folder=None))
    sink.write({"zerowatch/phase_seconds/forward": 0.5}, step=1, unix_seconds=1.0)
    sink.write({"zerowatch/phase_seconds/forward": 0.6}, step=2, unix_seconds=2.0)
    sink.close(failed=False)

    with (tmp_path / "zerowatch_phase_seconds_forward.csv").open() as stream:
        assert list(csv.reader(stream)) == [["step", "forward"], ["8", "0.5"], ["16", "0.6"]]


def test_the_event_file_is_deepspeeds_and_stays_open(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        sink = sinks_of(tb_monitor=SimpleNamespace(summary_writer=writer))["tensorboard"]
        sink.open(SinkRun(run_id="r", folder=None))
        sink.write({"zerowatch/loss": 2.5}, step=3, unix_seconds=1.0)
        sink.close(failed=False)
        writer.add_scalar("Train/Samples/lr", 0.1, 24)

    assert len(list(tmp_path.iterdir())) == 1
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [each.step for each in events.Scalars("zerowatch/loss")] == [24]
    assert [each.step for each in events.Scalars("Train/Samples/lr")] == [24]


def test_deepspeeds_wandb_monitor_is_the_scripts_run() -> None:
    assert isinstance(sinks_of(wandb_monitor=object())["wandb"], WandbSink)
