"""Tests that the callbacks are what their frameworks accept; `tests/examples/` trains with them.

They cover transformers_callback.py, accelerate_tracker.py and lightning_callback.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
from accelerate.tracking import GeneralTracker
from fakes.framework_watch import FrameworkWatch
from transformers import TrainerCallback

import zerowatch
from zerowatch.runtime import entry_points
from zerowatch.runtime.instrumentation.engine_hooks import is_divided_by_lightning
from zerowatch.runtime.integrations import attachment
from zerowatch.runtime.monitor.watch import NullWatch


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The state of a new process, to which nothing is attached."""
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize)
    monkeypatch.setattr(entry_points, "_process", entry_points._Process())
    yield
    entry_points.close_watch(failed=False)


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


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> FrameworkWatch:
    """The watch of the engine that Accelerate makes after it has made its trackers."""
    watch = FrameworkWatch()
    monkeypatch.setattr(attachment, "current_watch", lambda: watch if watch.is_open else None)
    return watch


def test_a_tracker_writes_the_configuration_even_if_the_script_logs_nothing(
    watch: FrameworkWatch,
) -> None:
    tracker = zerowatch.AccelerateTracker()

    tracker.store_init_configuration({"lr": 0.1})
    tracker.finish()

    assert watch.logged == [({"lr": 0.1}, None)]
    assert watch.ended is False


def test_a_tracker_writes_the_configuration_once_and_before_the_values(
    watch: FrameworkWatch,
) -> None:
    sink = SimpleNamespace()
    tracker = zerowatch.AccelerateTracker(sinks=[sink])

    tracker.store_init_configuration({"lr": 0.1})
    tracker.log({"loss": 2.0}, step=1)
    tracker.log({"loss": 1.0}, step=2)
    tracker.finish()

    assert watch.logged == [({"lr": 0.1}, None), ({"loss": 2.0}, 1), ({"loss": 1.0}, 2)]
    assert watch.sinks == [sink]


def test_a_tracker_keeps_the_configuration_until_there_is_an_engine(watch: FrameworkWatch) -> None:
    tracker = zerowatch.AccelerateTracker()
    tracker.store_init_configuration({"lr": 0.1})

    watch.is_open = False
    tracker.log({"loss": 2.0}, step=1)
    watch.is_open = True
    tracker.log({"loss": 1.0}, step=2)

    assert watch.logged == [({"lr": 0.1}, None), ({"loss": 1.0}, 2)]


@pytest.mark.parametrize("failed", [False, True])
def test_a_training_that_was_monitored_ends_as_it_did_and_without_a_warning(
    watch: FrameworkWatch, failed: bool, caplog: pytest.LogCaptureFixture
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


def test_a_tracker_may_end_twice_without_a_warning(
    watch: FrameworkWatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = zerowatch.AccelerateTracker()

    tracker.log({"loss": 1.0}, step=1)
    tracker.finish()
    tracker.finish()

    assert watch.ended is False
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


def test_a_tracker_ends_the_watch_on_each_rank_and_needs_no_folder() -> None:
    tracker = zerowatch.AccelerateTracker

    assert (tracker.name, tracker.main_process_only) == ("zerowatch", False)
    assert not tracker.requires_logging_directory


def test_sinks_are_added_once_to_each_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = FrameworkWatch(), FrameworkWatch()
    sinks: list[Any] = [object(), object()]
    attached = attachment.Attachment("TheCallback", None, iter(sinks))

    for watch in (None, first, first, second):
        monkeypatch.setattr(attachment, "current_watch", lambda watch=watch: watch)
        attached.begin()

    assert (first.sinks, second.sinks) == (sinks, sinks)


def test_without_an_engine_the_watch_of_an_attachment_does_nothing(
    watch: FrameworkWatch,
) -> None:
    attached = attachment.Attachment("TheCallback", None, ())
    before = attached.watch

    watch.is_open = False

    assert before is watch
    assert isinstance(attached.watch, NullWatch)
