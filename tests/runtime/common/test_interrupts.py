"""Tests of Ctrl-C at the end of a process: recognized, passed on by a launcher, repeated."""

from __future__ import annotations

import os
import signal
import threading
from types import SimpleNamespace

import pytest

from zerowatch.runtime.common import interrupts
from zerowatch.runtime.common.interrupts import (
    ended_by_next_interrupt,
    is_error_exit,
    is_interrupt,
)


class SIGTERMException(SystemExit):
    """As Lightning's, which it raises in its loop after SIGTERM."""


@pytest.fixture(autouse=True)
def python_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def error_of(error: type[BaseException], *arguments: object, cause: BaseException | None = None):
    try:
        try:
            if cause is not None:
                raise cause
        finally:
            raise error(*arguments)
    except BaseException as raised:
        return raised


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (SystemExit(1), True),
        (SystemExit("no more data"), True),
        (SIGTERMException(), True),
        (SystemExit(), False),
        (SystemExit(0), False),
        (ValueError(), False),
        (None, False),
    ],
)
def test_an_exit_with_a_status_or_after_sigterm_is_an_error(
    error: BaseException | None, expected: bool
) -> None:
    assert is_error_exit(error) is expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), True),
        (error_of(SystemExit, 130, cause=KeyboardInterrupt()), True),
        (SystemExit(1), False),
        (error_of(RuntimeError, "in a finally block", cause=KeyboardInterrupt()), False),
        (None, False),
    ],
)
def test_ctrl_c_is_recognized_also_behind_the_exit_of_a_script_that_has_caught_it(error, expected):
    assert is_interrupt(error) is expected


def test_what_a_launcher_passes_on_is_ignored(monkeypatch):
    monkeypatch.setattr(interrupts, "PASSED_ON_SECONDS", 1e9)
    reached = []

    with ended_by_next_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("end")

    assert reached == ["end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_next_interrupt_ends_the_block_without_an_error(monkeypatch):
    monkeypatch.setattr(interrupts, "PASSED_ON_SECONDS", 0.0)

    with ended_by_next_interrupt():
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait(120)
        pytest.fail("not ended")

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_the_script_stays():
    calls = []
    signal.signal(signal.SIGINT, lambda *_: calls.append(1))

    with ended_by_next_interrupt():
        os.kill(os.getpid(), signal.SIGINT)

    assert calls == [1]


def test_another_thread_sets_no_handler():
    seen = []

    def body() -> None:
        with ended_by_next_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(120)

    assert seen == [signal.default_int_handler]


@pytest.mark.parametrize(("seconds", "ends"), [(0.99, False), (1.0, True)])
def test_a_launcher_passes_ctrl_c_on_within_a_second(
    monkeypatch: pytest.MonkeyPatch, seconds: float, ends: bool
) -> None:
    times = iter((50.0, 50.0 + seconds))
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: next(times)))
    reached = []

    with ended_by_next_interrupt():
        signal.raise_signal(signal.SIGINT)
        reached.append("end")

    assert reached == ([] if ends else ["end"])
