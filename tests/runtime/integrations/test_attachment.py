"""Tests of what the callbacks share: they attach to DeepSpeed, and leave it as it was."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch

import zerowatch
from zerowatch.errors import SettingsError
from zerowatch.metrics.catalog import training
from zerowatch.runtime import entry_points
from zerowatch.runtime.entry_points import attach, wrap_deepspeed
from zerowatch.runtime.integrations.attachment import Attachment

QUIET = {"serve": {"enabled": False}, "run_log": {"enabled": False}}


@pytest.fixture(autouse=True)
def original(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """The function of DeepSpeed in a new process. What the process opens is closed at the end."""
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize)
    monkeypatch.setattr(entry_points, "_process", entry_points._Process())
    yield deepspeed.initialize
    entry_points.close_watch(failed=False)


def test_detaching_restores_the_very_function_that_was_there(original: object) -> None:
    attachment = Attachment("a framework", None, ())
    attached = deepspeed.initialize
    attachment.detach()

    assert attached is not original
    assert deepspeed.initialize is original


def test_under_zerowatch_run_nothing_is_wrapped_twice(original: object) -> None:
    wrap_deepspeed(deepspeed)
    wrapped = deepspeed.initialize

    detach = attach()
    assert deepspeed.initialize is wrapped
    detach()

    assert deepspeed.initialize is wrapped


def test_monitoring_that_is_off_attaches_nothing(original: object) -> None:
    attach({"enabled": False})

    assert deepspeed.initialize is original


def test_a_wrong_setting_is_an_error_before_training() -> None:
    with pytest.raises(SettingsError, match=r"'serve\.prot'"):
        Attachment("a framework", {"serve": {"prot": 1}}, ())


def test_training_that_was_not_monitored_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    attachment = Attachment("TheCallback", None, ())

    attachment.begin()
    attachment.close()
    attachment.detach()

    (line,) = caplog.messages
    assert "TheCallback" in line


def test_monitoring_that_the_settings_switch_off_is_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attachment = Attachment("TheCallback", {"enabled": False}, ())

    with caplog.at_level(logging.INFO):
        attachment.begin()
        attachment.close()

    ((_, level, line),) = caplog.record_tuples
    assert level == logging.INFO
    assert "`enabled`" in line and "TheCallback" not in line


def train(attachment: Attachment, model: Any, optimizer: Any, num_steps: int) -> Any:
    """Train as the Trainer does, and return the watch."""
    attachment.begin()
    for _ in range(num_steps):
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
        attachment.begin()
    watch = attachment.watch
    attachment.close()
    return watch


@pytest.mark.parametrize("same_model", [False, True])
@pytest.mark.parametrize("same_callback", [False, True])
def test_each_training_without_deepspeed_has_a_run_of_its_own(
    same_callback: bool, same_model: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = QUIET | {"run_id": "folds"}
    attachment = Attachment("TheCallback", settings, ())
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watches = []

    for num_steps in (2, 3, 4):
        watches.append(train(attachment, model, optimizer, num_steps))
        if not same_model:
            model = torch.nn.Linear(2, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if not same_callback:
            attachment = Attachment("TheCallback", settings, ())

    # A watch opens in the first step, and counts those after it.
    assert [watch.snapshot().value(training.STEPS) for watch in watches] == [1, 2, 3]
    assert [watch.run_id for watch in watches] == ["folds", "folds-2", "folds-3"]
    assert caplog.messages == []


def test_a_callback_monitors_after_a_watch_that_the_script_opened_and_closed() -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerowatch.watch(model, optimizer, QUIET).close()

    watch = train(Attachment("TheCallback", QUIET, ()), model, optimizer, num_steps=3)

    assert watch.snapshot().value(training.STEPS) == 2


def test_a_callback_that_is_used_again_warns_of_the_training_that_was_not_monitored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    attachment = Attachment("TheCallback", QUIET, ())
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    train(attachment, model, optimizer, num_steps=2)
    attachment.close()
    of_the_first = list(caplog.messages)
    train(attachment, model, optimizer, num_steps=0)

    assert of_the_first == []
    (line,) = caplog.messages
    assert "TheCallback" in line
