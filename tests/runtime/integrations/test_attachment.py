"""Tests of what the callbacks share: they attach to DeepSpeed, and leave it as it was."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from accelerate.utils import find_executable_batch_size

import zerowatch
from zerowatch.errors import SettingsError
from zerowatch.metrics.catalog import training
from zerowatch.runtime import entry_points
from zerowatch.runtime.common.torch_engine import torch_engine
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
    attachment.begin_training()
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


def train_until_error(
    callback: Any, model: Any, optimizer: Any, num_steps: int, error: type[BaseException]
) -> Any:
    """Train as the Trainer does until it raises, and return the watch."""
    callback.on_train_begin(None, None, None)
    for _ in range(num_steps):
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
        callback.on_step_end(None, None, None)
    watch = callback.watch
    try:
        raise error  # no event follows
    except error:
        return watch


@pytest.mark.parametrize("same_model", [False, True])
@pytest.mark.parametrize("same_callback", [False, True])
def test_a_training_after_one_that_raised_has_a_run_of_its_own(
    same_callback: bool, same_model: bool, tmp_path: Path
) -> None:
    settings = {
        "serve": {"enabled": False},
        "run_log": {"folder": str(tmp_path)},
        "run_id": "tries",
    }
    callback = zerowatch.TransformersCallback(settings)
    first = torch.nn.Linear(2, 3)
    second = first if same_model else torch.nn.Linear(2, 3)
    watches = []

    for model, num_steps in ((first, 3), (second, 4)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        watches.append(train_until_error(callback, model, optimizer, num_steps, RuntimeError))
        if not same_callback:
            callback = zerowatch.TransformersCallback(settings)
    callback.on_train_begin(None, None, None)

    assert [watch.snapshot().value(training.STEPS) for watch in watches] == [2, 3]
    assert not any(watch.is_open for watch in watches)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["tries", "tries-2"]


@pytest.mark.parametrize(
    ("last", "reason"), [(KeyboardInterrupt(), "interrupted"), (None, "exception")]
)
def test_a_training_that_the_user_interrupts_in_a_notebook_has_not_failed(
    last: BaseException | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = zerowatch.TransformersCallback(QUIET)
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    watch = train_until_error(callback, model, optimizer, 2, KeyboardInterrupt)
    monkeypatch.setattr(sys, "last_value", last, raising=False)
    callback.on_train_begin(None, None, None)

    assert watch.snapshot().value(training.RUN_END_INFO, reason) == 1


def test_a_training_that_raises_after_an_interrupted_cell_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    callback = zerowatch.TransformersCallback(QUIET)
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr(sys, "last_value", KeyboardInterrupt(), raising=False)

    watch = train_until_error(callback, model, optimizer, 2, RuntimeError)
    callback.on_train_begin(None, None, None)

    assert watch.snapshot().value(training.RUN_END_INFO, "exception") == 1


def test_a_watch_that_the_script_opened_for_a_training_is_its_watch() -> None:
    callback = zerowatch.TransformersCallback(QUIET)
    model = torch.nn.Linear(2, 3)
    watch = zerowatch.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), QUIET)

    callback.on_train_begin(None, None, None)

    assert callback.watch is watch


def test_each_try_of_another_batch_size_has_a_run_of_its_own() -> None:
    attach(QUIET)
    watches = []

    @find_executable_batch_size(starting_batch_size=8)
    def loop(batch_size: int) -> int:
        model = torch.nn.Linear(2, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(batch_size, 2)).square().mean().backward()
            optimizer.step()
        watches.append(entry_points.current_watch())
        if batch_size == 8:
            raise RuntimeError("CUDA out of memory.")
        return batch_size

    assert loop() < 8
    watches[1].close()
    assert watches[0] is not watches[1]
    assert [watch.snapshot().value(training.STEPS) for watch in watches] == [2, 2]


def test_optimizers_beside_the_watched_model_are_checked_ten_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    attach(QUIET)
    model, collections = torch.nn.Linear(2, 3), []
    monkeypatch.setattr(gc, "collect", lambda: collections.append(1))

    def step(model: torch.nn.Module, num_steps: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(num_steps):
            model(torch.ones(4, 2)).square().mean().backward()
            optimizer.step()

    step(model, 3)
    watch = entry_points.current_watch()
    for _ in range(2 * entry_points.MAX_PASSED_OVER):
        step(torch.nn.Linear(2, 3), 2)

    assert len(collections) == entry_points.MAX_PASSED_OVER
    assert entry_points.current_watch() is watch


def train_copy(num_steps: int) -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()


def test_short_trainings_one_after_another_have_few_runs_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attach({"serve": {"enabled": False}, "run_log": {"folder": str(tmp_path)}})
    tensor = torch.ones(2, requires_grad=True)

    for _ in range(20):
        train_copy(3)
        tensor.square().sum().backward()
        torch.optim.SGD([tensor]).step()  # no module holds it

    (line,) = [line for line in caplog.messages if "zerowatch.watch(" in line]
    assert line.startswith(f"{entry_points.MAX_SHORT_RUNS} runs")
    assert len(list(tmp_path.iterdir())) == entry_points.MAX_SHORT_RUNS + 1


@pytest.mark.parametrize("is_long", [False, True])
def test_after_short_trainings_a_model_is_watched_once_it_is_trained_for_long(
    is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_points, "SHORT_RUN_STEPS", 20)
    attach(QUIET)
    for _ in range(entry_points.MAX_SHORT_RUNS + 1):
        train_copy(2)
    last_short = entry_points.current_watch()

    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(21 if is_long else 20):
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()

    watch = entry_points.current_watch()
    assert watch is not None
    assert watch.watches(torch_engine(model, optimizer)) == is_long
    assert (watch is last_short) != is_long


def test_long_trainings_one_after_another_have_a_run_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points, "SHORT_RUN_STEPS", 20)
    attach(QUIET)
    watches = set()

    for _ in range(2 * entry_points.MAX_SHORT_RUNS):
        train_copy(21)
        watches.add(entry_points.current_watch())

    assert len(watches) == 2 * entry_points.MAX_SHORT_RUNS


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
