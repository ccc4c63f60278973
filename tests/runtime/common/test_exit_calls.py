"""Tests of the calls of `sys.exit` of a script: which ones end it with an error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from threading import Thread

import pytest

from zerowatch.runtime.common.exit_calls import ExitCalls
from zerowatch.runtime.common.fail_open import FailOpen


class Script:
    """A script whose calls of `sys.exit` are noted. It catches the exits and may go on."""

    def __init__(self) -> None:
        self.steps = 1
        self.fail_open = FailOpen()
        self.calls = ExitCalls(self.progress, self.fail_open)

    def progress(self) -> int:
        return self.steps

    def exit(self, *status: object) -> None:
        try:
            sys.exit(*status)  # type: ignore[arg-type]
        except SystemExit as error:
            assert error.code == (status[0] if status else None)


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    yield script
    script.calls.close()


@pytest.mark.parametrize("status", [1, -1, 2, "no data", True])
def test_another_status_than_zero_is_an_error(script: Script, status: object) -> None:
    script.exit(status)

    assert script.calls.has_failed


@pytest.mark.parametrize("status", [(), (None,), (0,), (False,)])
def test_no_status_and_zero_are_no_errors(script: Script, status: tuple[object, ...]) -> None:
    script.exit(1)
    script.exit(*status)

    assert not script.calls.has_failed


@pytest.mark.parametrize(("steps", "has_failed"), [(1, True), (2, False)])
def test_a_script_that_goes_on_has_caught_the_exit(
    script: Script, steps: int, has_failed: bool
) -> None:
    script.exit(1)
    script.steps = steps

    assert script.calls.has_failed == has_failed


def test_the_exit_of_another_thread_ends_no_script(script: Script) -> None:
    thread = Thread(target=lambda: script.exit(1))
    thread.start()
    thread.join()

    assert not script.calls.has_failed


def test_an_exit_after_ctrl_c_is_no_failure(script: Script) -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        script.exit(130)

    assert not script.calls.has_failed


def test_a_note_that_fails_does_not_keep_the_script_from_ending(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> int:
        raise ValueError

    monkeypatch.setattr(script.calls, "_progress", fail)
    script.exit(1)

    assert script.fail_open.failures == {"exit": 1}


def test_after_a_close_the_same_function_is_back() -> None:
    before = sys.exit
    calls = ExitCalls(lambda: 1, FailOpen())
    wrapped = sys.exit

    calls.close()
    calls.close()

    assert wrapped is not before
    assert sys.exit is before
