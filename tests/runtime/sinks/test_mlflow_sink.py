"""Tests of the sink of MLflow with a store of files: joined runs, own runs, many values."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from zerowatch.runtime.sinks.mlflow_sink import MAX_PER_REQUEST, MlflowSink
from zerowatch.runtime.sinks.sink import SinkRun

mlflow = pytest.importorskip("mlflow", reason="needs the extra mlflow")

RUN = SinkRun(run_id="r", folder=None)


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    yield
    mlflow.set_tracking_uri("")


def in_thread(call: object) -> None:
    """Call a function as the thread of the sinks does: without an active run of its own."""
    thread = threading.Thread(target=call)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def write_all(sink: MlflowSink, values: dict[str, float]) -> None:
    sink.open(RUN)
    sink.write(values, step=5, unix_seconds=1000.0)
    sink.close(failed=True)


def test_values_join_the_run_that_is_active_in_the_scripts_thread() -> None:
    with mlflow.start_run() as run:
        in_thread(lambda: write_all(MlflowSink(), {"zerowatch/loss": 2.5}))

    client = mlflow.MlflowClient()
    (metric,) = client.get_metric_history(run.info.run_id, "zerowatch/loss")
    assert (metric.value, metric.step, metric.timestamp) == (2.5, 5, 1_000_000)
    joined = client.get_run(run.info.run_id)
    assert joined.info.status == "FINISHED"  # as the script ended it
    assert joined.data.tags["zerowatch.run_id"] == "r"


def test_without_a_run_of_the_script_one_is_begun_that_the_script_does_not_see() -> None:
    in_thread(lambda: write_all(MlflowSink(), {"zerowatch/loss": 2.5}))

    assert mlflow.active_run() is None
    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert (run.info.run_name, run.info.status) == ("r", "FAILED")


def test_more_values_than_a_request_may_have_are_all_written() -> None:
    values = {f"zerowatch/{number}": 1.0 for number in range(MAX_PER_REQUEST + 1)}

    in_thread(lambda: write_all(MlflowSink(), values))

    (run,) = mlflow.MlflowClient().search_runs(["0"])
    assert len(run.data.metrics) == MAX_PER_REQUEST + 1
