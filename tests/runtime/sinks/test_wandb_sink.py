"""Tests of the sink of W&B in offline mode: joined runs, own runs, finished runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from zerowatch.runtime.sinks.sink import SinkRun
from zerowatch.runtime.sinks.wandb_sink import WandbSink

wandb = pytest.importorskip("wandb", reason="needs the extra wandb")
from wandb_files import rows as rows_in  # noqa: E402

RUN = SinkRun(run_id="r", folder=None)


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    yield
    wandb.teardown()


def rows(folder: Path) -> list[tuple[int, dict[str, object]]]:
    wandb.teardown()  # waits until W&B's own process has written the file
    return rows_in(folder)


def test_values_join_the_rows_of_the_scripts_run_and_move_no_step(tmp_path: Path) -> None:
    run = wandb.init()
    sink = WandbSink()

    sink.open(RUN)
    sink.write({"zerowatch/step": 1.0, "zerowatch/loss": 2.5}, step=1, unix_seconds=1.0)
    run.log({"accuracy": 0.1}, step=10)
    sink.write({"zerowatch/step": 2.0, "zerowatch/loss": 1.5}, step=2, unix_seconds=2.0)
    run.log({"accuracy": 0.2}, step=11)
    sink.close(failed=False)
    run.finish()

    found = rows(tmp_path)
    assert [(step, row["accuracy"]) for step, row in found if "accuracy" in row] == [
        (10, 0.1),
        (11, 0.2),
    ]
    assert [row["zerowatch/loss"] for _, row in found if "zerowatch/loss" in row] == [2.5, 1.5]


def test_values_after_the_script_has_finished_its_run_are_ignored(tmp_path: Path) -> None:
    run = wandb.init()
    sink = WandbSink()
    sink.open(RUN)
    run.log({"accuracy": 0.1})
    run.finish()

    sink.write({"zerowatch/step": 1.0}, step=1, unix_seconds=1.0)
    sink.close(failed=False)

    assert [row for _, row in rows(tmp_path)] == [{"accuracy": 0.1}]


def test_without_a_run_of_the_script_each_write_is_a_row_of_an_own_run(tmp_path: Path) -> None:
    sink = WandbSink()

    sink.open(RUN)
    assert wandb.run is None  # a run that the script begins later is not affected
    sink.write({"zerowatch/step": 1.0, "zerowatch/loss": 2.5}, step=1, unix_seconds=1.0)
    sink.write({"zerowatch/step": 2.0, "zerowatch/loss": 1.5}, step=2, unix_seconds=2.0)
    sink.close(failed=True)

    assert [row for _, row in rows(tmp_path)] == [
        {"zerowatch/step": 1, "zerowatch/loss": 2.5},
        {"zerowatch/step": 2, "zerowatch/loss": 1.5},
    ]
