"""Tests that the callbacks are what their frameworks accept; `tests/examples/` trains with them.

They cover transformers_callback.py, accelerate_tracker.py and lightning_callback.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import deepspeed
import pytest
from accelerate.tracking import GeneralTracker
from transformers import TrainerCallback

import zerowatch
from zerowatch.runtime.instrumentation.engine_hooks import is_divided_by_lightning
from zerowatch.runtime.integrations import attachment
from zerowatch.runtime.monitor.watch import NullWatch


@pytest.fixture(autouse=True)
def initialize(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize)


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("TransformersCallback", TrainerCallback),
        ("AccelerateTracker", GeneralTracker),
    ],
)
def test_a_callback_is_of_the_class_that_its_framework_accepts(name: str, base: type) -> None:
    assert isinstance(getattr(zerowatch, name)(), base)


def test_a_tracker_without_an_engine_accepts_all_calls() -> None:
    tracker = zerowatch.AccelerateTracker()

    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 1.0}, step=1)
    tracker.finish()

    assert isinstance(tracker.tracker, NullWatch)


class Watched:
    """Stands in for the watch of an engine, and keeps what is passed to it."""

    is_open = True

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, object], int | None]] = []
        self.sinks: list[object] = []
        self.ended: bool | None = None

    def log_values(self, values: dict[str, object], step: int | None = None) -> None:
        assert self.is_open
        self.logged.append((values, step))

    def add_sink(self, sink: object) -> None:
        self.sinks.append(sink)

    def close(self, *, failed: bool) -> None:
        self.is_open, self.ended = False, failed


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """The watch of the engine that Accelerate makes after it has made its trackers."""
    watch = Watched()
    monkeypatch.setattr(attachment, "current_watch", lambda: watch if watch.is_open else None)
    return watch


def test_a_tracker_writes_the_configuration_even_if_the_script_logs_nothing(watch: Watched) -> None:
    tracker = zerowatch.AccelerateTracker()

    tracker.store_init_configuration({"lr": 0.1})
    tracker.finish()

    assert watch.logged == [({"lr": 0.1}, None)]
    assert watch.ended is False


def test_a_tracker_writes_the_configuration_once_and_before_the_values(watch: Watched) -> None:
    sink = SimpleNamespace()
    tracker = zerowatch.AccelerateTracker(sinks=[sink])

    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 2.0}, step=1)
    tracker.log({"loss": 1.0}, step=2)
    tracker.finish()

    assert watch.logged == [({"lr": 0.1}, None), ({"loss": 2.0}, 1), ({"loss": 1.0}, 2)]
    assert watch.sinks == [sink]


def test_a_tracker_keeps_the_configuration_until_there_is_an_engine(watch: Watched) -> None:
    tracker = zerowatch.AccelerateTracker()
    tracker.store_init_configuration({"lr": 0.1})

    watch.is_open = False
    tracker.log({"loss": 2.0}, step=1)
    watch.is_open = True
    tracker.log({"loss": 1.0}, step=2)

    assert watch.logged == [({"lr": 0.1}, None), ({"loss": 1.0}, 2)]


@pytest.mark.parametrize("failed", [False, True])
def test_a_training_that_was_monitored_ends_as_it_did_and_without_a_warning(
    watch: Watched, failed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    attached = attachment.Attachment("TheCallback", None, ())

    attached.begin()
    attached.close(failed=failed)
    attached.close()

    assert watch.ended is failed
    assert caplog.messages == []


def test_a_training_that_failed_before_its_engine_gets_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attachment.Attachment("TheCallback", None, ()).close(failed=True)

    assert caplog.messages == []


def test_lightnings_callback_is_of_the_class_that_lightning_accepts() -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs the extra lightning")

    assert isinstance(zerowatch.LightningCallback(), lightning.Callback)


def test_lightning_divides_losses_unless_a_module_optimizes_by_itself() -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="needs the extra lightning")
    automatic, manual = lightning.LightningModule(), lightning.LightningModule()
    manual.automatic_optimization = False

    divided = [is_divided_by_lightning(module) for module in (automatic, manual, object())]

    assert divided == [True, False, False]
