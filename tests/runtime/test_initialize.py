"""Keyword arguments of `zerowatch.initialize` that only another version of DeepSpeed has."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import zerowatch

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
