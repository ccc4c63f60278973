"""Tests of which sinks the settings and the ds config ask for."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerowatch.metrics.settings import load_settings
from zerowatch.runtime.sinks import configured_sinks as module
from zerowatch.runtime.sinks.configured_sinks import configured_sinks
from zerowatch.runtime.sinks.mlflow_sink import MlflowSink
from zerowatch.runtime.sinks.tensorboard_sink import TensorboardSink
from zerowatch.runtime.sinks.wandb_sink import WandbSink


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All libraries of trackers can be found; none is imported before its sink opens."""
    monkeypatch.setattr(module, "find_spec", lambda name: ModuleSpec(name, None, origin="a.py"))


def names(*, wandb_monitor: object = None, **settings: object) -> list[str]:
    engine: Any = SimpleNamespace(
        monitor=SimpleNamespace(tb_monitor=None, wandb_monitor=wandb_monitor, csv_monitor=None),
        train_batch_size=lambda: 8,
    )
    loaded = load_settings({"sinks": settings}).sinks
    return [name for name, _ in configured_sinks(loaded, lambda: engine)]


def test_no_tracker_is_written_to_unless_asked_for() -> None:
    assert names() == []


def test_the_environment_variable_names_several_trackers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROWATCH_SINKS_NAMES", "tensorboard, mlflow")

    assert names() == ["tensorboard", "mlflow"]


def test_a_tracker_of_the_ds_config_is_written_to_once() -> None:
    assert names(wandb_monitor=object(), names=["wandb", "mlflow"]) == ["wandb", "mlflow"]


def test_the_monitors_of_the_ds_config_can_be_left_out() -> None:
    assert names(wandb_monitor=object(), deepspeed_monitor=False) == []


# W&B's own folder ./wandb can be imported, and has no origin.
@pytest.mark.parametrize("spec", [None, ModuleSpec("wandb", None)])
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, spec: ModuleSpec | None
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: spec)

    assert names(names=["wandb"]) == []

    assert "pip install 'zerowatch[wandb]'" in caplog.text


def test_each_name_makes_the_sink_of_that_tracker() -> None:
    engine: Any = SimpleNamespace(monitor=None)
    loaded = load_settings({"sinks": {"names": ["wandb", "mlflow", "tensorboard"]}}).sinks

    kinds = {name: type(sink) for name, sink in configured_sinks(loaded, lambda: engine)}

    assert kinds == {"wandb": WandbSink, "mlflow": MlflowSink, "tensorboard": TensorboardSink}


@pytest.mark.parametrize("folder", (None, Path("/logs")))
def test_the_folder_of_event_files_is_that_of_the_settings(
    monkeypatch: pytest.MonkeyPatch, folder: Path | None
) -> None:
    monkeypatch.setattr(module, "TensorboardSink", lambda folder: ("in", folder))
    engine: Any = SimpleNamespace(monitor=None)
    settings = {"names": ["tensorboard"], "tensorboard_folder": folder}

    sinks = list(configured_sinks(load_settings({"sinks": settings}).sinks, lambda: engine))

    assert sinks == [("tensorboard", ("in", folder))]
