"""Tests of what the callbacks share: they attach to DeepSpeed, and leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import deepspeed
import pytest

from zerowatch.errors import SettingsError
from zerowatch.runtime.entry_points import attach, wrap_deepspeed
from zerowatch.runtime.integrations.attachment import Attachment


@pytest.fixture(autouse=True)
def original(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize)
    return deepspeed.initialize


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
