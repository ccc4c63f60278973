"""Tests of the error that a script already handled when a run began."""

from __future__ import annotations

import sys

import pytest
import torch

from zerowatch.runtime.common.outer_error import OuterError


def test_only_the_error_that_was_handled_before_is_the_outer_one() -> None:
    try:
        raise OSError(2, "no checkpoint")
    except OSError:
        outer = OuterError()
        in_handler = outer.newer()
        try:
            raise ValueError
        except ValueError as error:
            is_own = outer.newer() is error

    assert (in_handler, is_own) == (None, True)
    assert outer.newer() is None


def test_without_an_error_every_error_is_newer() -> None:
    outer = OuterError()

    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        is_newer = outer.newer() is error

    assert is_newer


def test_a_later_error_at_the_same_address_is_newer() -> None:
    try:
        raise ValueError("first")
    except ValueError:
        outer, address = OuterError(), id(sys.exception())

    try:
        raise ValueError("second")
    except ValueError as error:
        is_newer, is_at_same_address = outer.newer() is error, id(error) == address

    assert is_at_same_address  # CPython gives the next error the memory of the last
    assert is_newer


def test_only_an_uncaught_error_from_afterwards_is_newer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "last_value", raising=False)
    first, earlier, later = OuterError(), KeyboardInterrupt(), ValueError()
    monkeypatch.setattr(sys, "last_value", earlier, raising=False)
    second = OuterError()
    in_between = first.newer_uncaught(), second.newer_uncaught()

    monkeypatch.setattr(sys, "last_value", later)

    assert in_between == (earlier, None)
    assert (first.newer_uncaught(), second.newer_uncaught()) == (later, later)


def test_the_variables_of_the_failed_step_are_freed() -> None:
    freed: list[bool] = []

    class Batch:
        def __del__(self) -> None:
            freed.append(True)

    def step() -> None:
        batch = Batch()
        raise torch.OutOfMemoryError(f"no memory for {type(batch).__name__}")

    try:
        step()
    except torch.OutOfMemoryError:
        outer = OuterError()

    assert freed == [True]
    assert outer.newer() is None
