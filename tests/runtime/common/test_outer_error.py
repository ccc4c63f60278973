"""Tests of the error that a script already handled when a run began."""

from __future__ import annotations

import sys

import torch

from zerowatch.runtime.common.outer_error import OuterError


def test_only_the_error_that_was_handled_before_is_the_outer_one() -> None:
    try:
        raise OSError(2, "no checkpoint")
    except OSError as earlier:
        outer = OuterError()
        in_handler = outer.newer()
        try:
            raise ValueError
        except ValueError as error:
            nested, is_own = outer.newer(), outer.newer() is error
        is_earlier = outer.is_it(earlier)

    assert (in_handler, is_own, is_earlier) == (None, True, True)
    assert not outer.is_it(nested)
    assert outer.newer() is None


def test_without_an_error_every_error_is_newer() -> None:
    outer = OuterError()

    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        is_newer = outer.newer() is error

    assert is_newer
    assert not outer.is_it(None)


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
