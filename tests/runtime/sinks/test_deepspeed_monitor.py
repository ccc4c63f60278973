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

BATCH_SIZE = 8


class FakeWriter:
    """Keeps the calls that reach DeepSpeed's writer of event files."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def add_scalar(self, name: str, value: float, global_step: int, walltime: float) -> None:
        self.calls.append((name, value, global_step, walltime))

    def flush(self) -> None:
        self.calls.append(("flush",))


def sinks_of(**monitors: object) -> dict[str, Sink]:
    """Return the sinks of an engine with these monitors; the others are None, as in DeepSpeed."""
    none = {"tb_monitor": None, "wandb_monitor": None, "csv_monitor": None}
    engine: Any = SimpleNamespace(
        monitor=SimpleNamespace(**(none | monitors)), train_batch_size=lambda: BATCH_SIZE
    )
    return dict(deepspeed_sinks(lambda: engine))


def engine_with(writer: FakeWriter) -> Any:
    monitor = SimpleNamespace(tb_monitor=SimpleNamespace(summary_writer=writer))
    return SimpleNamespace(monitor=monitor, train_batch_size=lambda: BATCH_SIZE)


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
    pytest.importorskip("tensorboard", reason="needs the extra tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

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


def test_the_sinks_of_all_monitors_have_their_names_and_an_off_monitor_has_none(
    tmp_path: Path,
) -> None:
    monitors: Any = {
        "tb_monitor": SimpleNamespace(summary_writer=FakeWriter()),
        "wandb_monitor": object(),
        "csv_monitor": SimpleNamespace(log_dir=str(tmp_path)),
    }
    without_files: Any = {  # as on other ranks
        "tb_monitor": SimpleNamespace(summary_writer=None),
        "csv_monitor": SimpleNamespace(log_dir=None),
    }

    assert list(sinks_of(**monitors)) == ["tensorboard", "wandb", "csv"]
    assert sinks_of(**without_files) == {}


@pytest.mark.parametrize("engine", (None, object()))
def test_a_model_without_deepspeed_has_no_sinks(engine: object) -> None:
    assert list(deepspeed_sinks(lambda: engine)) == []


def test_a_value_reaches_the_event_file_with_the_samples_of_its_step_and_its_time() -> None:
    writer = FakeWriter()
    sink = sinks_of(tb_monitor=SimpleNamespace(summary_writer=writer))["tensorboard"]

    sink.open(SinkRun(run_id="r", folder=None))
    sink.write({"zerowatch/loss": 2.5}, step=3, unix_seconds=1000.5)
    sink.close(failed=False)

    assert writer.calls == [("zerowatch/loss", 2.5, 24, 1000.5), ("flush",)]


def test_after_a_rebuild_the_file_of_the_new_engine_is_written_and_kept_when_it_is_gone() -> None:
    first, second = FakeWriter(), FakeWriter()
    current: list[Any] = [engine_with(first)]
    (_, sink), *_ = deepspeed_sinks(lambda: current[0])

    current[0] = engine_with(second)
    sink.write({"a": 1.0}, step=1, unix_seconds=1.0)
    current[0] = SimpleNamespace(monitor=SimpleNamespace(tb_monitor=None))
    sink.write({"b": 2.0}, step=2, unix_seconds=2.0)
    current[0] = None
    sink.write({"c": 3.0}, step=3, unix_seconds=3.0)

    assert first.calls == []
    assert second.calls == [("a", 1.0, 8, 1.0), ("b", 2.0, 16, 2.0), ("c", 3.0, 24, 3.0)]


def test_a_csv_file_has_no_slash_and_no_space_in_its_name_and_one_header(tmp_path: Path) -> None:
    sink = sinks_of(csv_monitor=SimpleNamespace(log_dir=str(tmp_path)))["csv"]

    sink.write({"zerowatch/a b/c d": 0.5, "plain": 0.25}, step=1, unix_seconds=1.0)
    sink.write({"plain": 0.75}, step=3, unix_seconds=2.0)

    files = {path.name: path.read_text().split() for path in tmp_path.iterdir()}
    assert files == {
        "zerowatch_a_b_c_d.csv": ["step,c", "d", "8,0.5"],
        "plain.csv": ["step,plain", "8,0.25", "24,0.75"],
    }
