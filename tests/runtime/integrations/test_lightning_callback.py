"""What the events of Lightning's Trainer do with the watch, without Lightning itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import deepspeed
import pytest
from fakes.framework_watch import FrameworkWatch

from zerowatch.errors import SettingsError
from zerowatch.runtime import entry_points
from zerowatch.runtime.integrations import attachment
from zerowatch.runtime.monitor.watch import NullWatch

MODULE = "zerowatch.runtime.integrations.lightning_callback"


class Callback:
    """Stands in for Lightning's base class."""


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module of the callback, imported with a fake of pytorch_lightning."""
    fake: Any = ModuleType("pytorch_lightning")
    fake.Callback = Callback
    monkeypatch.setitem(sys.modules, "pytorch_lightning", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize)
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setattr(entry_points, "_process", entry_points._Process())
    yield importlib.import_module(MODULE)
    entry_points.close_watch(failed=False)
    sys.modules.pop(MODULE, None)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> FrameworkWatch:
    watch = FrameworkWatch()
    monkeypatch.setattr(attachment, "current_watch", lambda: watch if watch.is_open else None)
    return watch


def trainer_at(step: int, metrics: Mapping[str, float], *, sanity_checking: bool = False) -> Any:
    return SimpleNamespace(
        global_step=step, callback_metrics=metrics, sanity_checking=sanity_checking
    )


def test_the_older_name_of_lightning_is_used_if_there_is_no_other(lightning: Any) -> None:
    assert issubclass(lightning.LightningCallback, Callback)


def test_a_fit_has_its_sinks_its_logged_values_and_its_end(
    lightning: Any, watch: FrameworkWatch
) -> None:
    sink, unwrapped = object(), deepspeed.initialize
    callback = lightning.LightningCallback(sinks=[sink])
    trainer = trainer_at(5, {"loss": 2.5})

    before = callback.watch
    callback.setup(trainer, None, "fit")
    wrapped = deepspeed.initialize
    callback.on_train_start(trainer, None)
    callback.on_train_batch_end(trainer, None, {}, {}, 0)
    of_the_engine = callback.watch
    callback.on_validation_end(trainer_at(0, {"loss": 9.0}, sanity_checking=True), None)
    callback.on_validation_end(trainer, None)
    callback.on_train_epoch_end(trainer_at(7, {"loss": 1.5}), None)
    callback.teardown(trainer, None, "fit")

    assert isinstance(before, NullWatch)
    assert of_the_engine is watch
    assert watch.sinks == [sink]
    assert watch.logged == [({"loss": 2.5}, 5), ({"loss": 1.5}, 7)]
    assert watch.ended is False
    assert (wrapped is unwrapped, deepspeed.initialize is unwrapped) == (False, True)
    assert isinstance(callback.watch, NullWatch)


@pytest.mark.parametrize("first_event", ["on_train_start", "on_train_batch_end"])
def test_the_sinks_are_added_as_soon_as_there_is_a_watch(
    first_event: str, lightning: Any, watch: FrameworkWatch
) -> None:
    callback = lightning.LightningCallback(sinks=[3])
    callback.setup(None, None, "fit")

    getattr(callback, first_event)(None, None)

    assert watch.sinks == [3]


class SIGTERMException(SystemExit):
    """As Lightning's, which it raises in its loop after SIGTERM."""


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (ValueError(), True),
        (SIGTERMException(), True),
        (SystemExit(3), True),
        (SystemExit(0), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_a_fit_that_ends_by_an_error_has_failed_and_by_an_interrupt_has_not(
    error: BaseException, failed: bool, lightning: Any, watch: FrameworkWatch
) -> None:
    callback = lightning.LightningCallback()
    callback.setup(None, None, "fit")
    callback.on_train_start(None, None)

    callback.on_exception(None, None, error)
    callback.teardown(None, None, "fit")

    assert watch.ended is failed


def test_only_a_fit_is_monitored(lightning: Any, watch: FrameworkWatch) -> None:
    callback = lightning.LightningCallback(sinks=[3])

    callback.setup(None, None, "validate")
    callback.on_train_batch_end(None, None)
    callback.teardown(None, None, "validate")
    never = list(watch.sinks)
    callback.setup(None, None, "fit")
    callback.on_train_start(None, None)
    callback.teardown(None, None, "test")

    assert (never, watch.sinks, watch.ended) == ([], [3], None)
    callback.teardown(None, None, "fit")


def test_settings_are_checked_at_the_start_of_a_fit(lightning: Any) -> None:
    callback = lightning.LightningCallback({"serve": {"prot": 1}})

    with pytest.raises(SettingsError, match=r"'serve\.prot'"):
        callback.setup(None, None, "fit")
