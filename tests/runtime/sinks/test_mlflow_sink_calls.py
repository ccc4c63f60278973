"""Tests of the calls that the sink of MLflow makes, with a fake library; MLflow is an extra."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from zerowatch.runtime.sinks.mlflow_sink import MlflowSink
from zerowatch.runtime.sinks.sink import SinkRun

RUN = SinkRun(run_id="run-7", folder=None)


class FakeMlflow(ModuleType):
    """The functions of MLflow that the sink uses; keeps their calls."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.calls: list[tuple[Any, ...]] = []
        self.active: str | None = None

    def start_run(self, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
        self.calls.append(("start", run_name, tags))
        return SimpleNamespace(info=SimpleNamespace(run_id="own"))

    def end_run(self, status: str) -> None:
        self.calls.append(("end", status))

    def MlflowClient(self) -> SimpleNamespace:
        return SimpleNamespace(
            set_tag=lambda *args: self.calls.append(("tag", *args)),
            log_batch=lambda run_id, metrics: self.calls.append(("batch", run_id, metrics)),
        )

    def newest_run(self) -> SimpleNamespace | None:
        if self.active is None:
            return None
        return SimpleNamespace(info=SimpleNamespace(run_id=self.active))


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    fake = FakeMlflow()
    entities, tracking = ModuleType("mlflow.entities"), ModuleType("mlflow.tracking")
    entities.Metric = lambda *args: args  # type: ignore[attr-defined]
    tracking.fluent = SimpleNamespace(  # type: ignore[attr-defined]
        _get_latest_active_run=fake.newest_run
    )
    for module in (fake, entities, tracking):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return fake


def test_values_go_to_the_active_run_with_step_and_milliseconds_and_the_run_stays_open(
    mlflow: FakeMlflow,
) -> None:
    mlflow.active = "script"
    sink = MlflowSink()

    sink.open(RUN)
    sink.write({"zerowatch/loss": 2.5, "zerowatch/samples": 8.0}, step=5, unix_seconds=3.25)
    sink.close(failed=True)

    assert mlflow.calls == [
        ("tag", "script", "zerowatch.run_id", "run-7"),
        (
            "batch",
            "script",
            [("zerowatch/loss", 2.5, 3250, 5), ("zerowatch/samples", 8.0, 3250, 5)],
        ),
    ]


def test_a_given_run_has_precedence_over_the_active_run(mlflow: FakeMlflow) -> None:
    mlflow.active = "script"
    sink = MlflowSink("given")

    sink.open(RUN)
    sink.close(failed=False)

    assert mlflow.calls == [("tag", "given", "zerowatch.run_id", "run-7")]


@pytest.mark.parametrize(("failed", "status"), [(False, "FINISHED"), (True, "FAILED")])
def test_a_run_of_its_own_has_the_name_of_the_run_and_ends_with_it(
    mlflow: FakeMlflow, failed: bool, status: str
) -> None:
    sink = MlflowSink()

    sink.open(RUN)
    sink.close(failed=failed)

    assert mlflow.calls == [
        ("start", "run-7", {"zerowatch.run_id": "run-7"}),
        ("end", status),
    ]


# MLflow rejects a request of more than 1000 metrics.
@pytest.mark.parametrize(
    ("num_values", "requests"), [(0, []), (1000, [1000]), (1001, [1000, 1]), (2000, [1000, 1000])]
)
def test_a_request_has_at_most_a_thousand_values(
    mlflow: FakeMlflow, num_values: int, requests: list[int]
) -> None:
    sink = MlflowSink("given")

    sink.write({f"v{number}": 1.0 for number in range(num_values)}, step=1, unix_seconds=1.0)

    assert [len(metrics) for _, _, metrics in mlflow.calls] == requests


def test_a_version_of_mlflow_that_cannot_name_the_active_run_gets_a_run_of_its_own(
    mlflow: FakeMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow.active = "script"
    monkeypatch.setattr(sys.modules["mlflow.tracking"], "fluent", SimpleNamespace())

    MlflowSink().open(RUN)

    assert mlflow.calls[0][:2] == ("start", "run-7")


def test_each_training_of_a_process_has_the_run_that_it_finds_or_one_of_its_own(
    mlflow: FakeMlflow,
) -> None:
    sink = MlflowSink()
    for active, name in ((None, "first"), (None, "second"), ("script", "third")):
        mlflow.active = active
        sink.open(SinkRun(run_id=name, folder=None))
        sink.close(failed=False)

    assert mlflow.calls == [
        ("start", "first", {"zerowatch.run_id": "first"}),
        ("end", "FINISHED"),
        ("start", "second", {"zerowatch.run_id": "second"}),
        ("end", "FINISHED"),
        ("tag", "script", "zerowatch.run_id", "third"),
    ]


def test_a_run_that_could_not_begin_does_not_end_the_run_of_the_script(
    mlflow: FakeMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(**options: object) -> SimpleNamespace:
        raise OSError("network is unreachable")

    sink = MlflowSink()
    monkeypatch.setattr(mlflow, "start_run", unreachable)
    with pytest.raises(OSError, match="unreachable"):
        sink.open(RUN)
    mlflow.active = "script"

    sink.open(RUN)
    sink.close(failed=False)

    assert mlflow.calls == [("tag", "script", "zerowatch.run_id", "run-7")]
