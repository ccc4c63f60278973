"""Tests of arguments of `zerowatch.initialize` that only another DeepSpeed version has."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import zerowatch
from zerowatch.metrics.settings import Settings
from zerowatch.runtime import entry_points

OFF = {"enabled": False}


def of_this_version(model: Any = None, config: Any = None) -> tuple[Any, ...]:
    return SimpleNamespace(given={"model": model, "config": config}), None, None, None


def of_a_later_version(model: Any = None, config: Any = None, plan: Any = None) -> tuple[Any, ...]:
    return SimpleNamespace(given={"model": model, "plan": plan}), None, None, None


def of_a_wrapper(**options: Any) -> tuple[Any, ...]:
    return SimpleNamespace(given=options), None, None, None


@pytest.mark.parametrize("original", [of_a_later_version, of_a_wrapper])
def test_a_parameter_that_deepspeed_has_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, original: Callable[..., Any]
) -> None:
    monkeypatch.setattr("deepspeed.initialize", original)

    engine, *_ = zerowatch.initialize(model=1, plan=2, settings=OFF)

    assert engine.given == {"model": 1, "plan": 2}


@pytest.mark.parametrize(("name", "advice"), [("plan", "'plan'"), ("setings", "mean 'settings'")])
def test_a_parameter_that_deepspeed_does_not_have_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, advice: str
) -> None:
    monkeypatch.setattr("deepspeed.initialize", of_this_version)

    with pytest.raises(TypeError, match=advice) as caught:
        zerowatch.initialize(model=1, **{name: 2}, settings=OFF)

    assert "deepspeed.initialize" in str(caught.value)


def test_no_first_step_is_expected_of_an_engine_without_an_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    startup = SimpleNamespace(expect_no_step=lambda: calls.append(1))
    monkeypatch.setattr(entry_points, "_process", SimpleNamespace(watch=None, startup=startup))

    entry_points._watch_first(SimpleNamespace(optimizer=None), Settings())

    assert calls == [1]
