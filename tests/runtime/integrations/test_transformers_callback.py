"""What the Trainer's events do with the watch of its engine."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
from fakes.framework_watch import FrameworkWatch

import zerowatch
from zerowatch.runtime import entry_points
from zerowatch.runtime.integrations import attachment


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[FrameworkWatch]:
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize)
    monkeypatch.setattr(entry_points, "_process", entry_points._Process())
    watch = FrameworkWatch()
    monkeypatch.setattr(attachment, "current_watch", lambda: watch if watch.is_open else None)
    yield watch
    entry_points.close_watch(failed=False)


def test_a_training_has_its_sinks_its_logged_values_and_its_end(watch: FrameworkWatch) -> None:
    sinks: Any = [object(), object()]
    callback = zerowatch.TransformersCallback(sinks=sinks)
    state = SimpleNamespace(global_step=7)

    callback.on_train_begin(None, state, None)
    begun = list(watch.sinks)
    callback.on_step_end(None, state, None)
    callback.on_log(None, state, None, logs={"loss": 2.5})
    callback.on_log(None, state, None)
    of_the_trainer = callback.watch
    callback.on_train_end(None, state, None)

    assert begun == watch.sinks == sinks
    assert watch.logged == [({"loss": 2.5}, 7), ({}, 7)]
    assert of_the_trainer is watch
    assert watch.ended is False


def test_a_watch_that_begins_in_the_first_step_has_the_sinks_too(watch: FrameworkWatch) -> None:
    sink: Any = object()
    callback = zerowatch.TransformersCallback(sinks=[sink])

    watch.is_open = False
    callback.on_train_begin(None, None, None)
    watch.is_open = True
    callback.on_step_end(None, None, None)

    assert watch.sinks == [sink]
