"""Tests of `FailOpen`: hooks that raise are dropped or retried, threads that raise start over.

Covers `backoff.py`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import pytest
import torch
from fakes.clock import FakeClock

from zerowatch.runtime.common.fail_open import (
    FIRST_RETRY_SECONDS,
    MAX_RESTARTS,
    FailOpen,
    MonitoringThread,
    is_out_of_device_memory,
    is_shortage,
)


def test_a_hook_that_raises_is_counted_logged_once_and_not_called_again(caplog) -> None:
    calls = []

    def broken(value: int) -> int:
        calls.append(value)
        raise KeyError("gone")

    fail_open = FailOpen()
    guarded = fail_open.wrap("mine", broken)

    results = [guarded(1), guarded(2)]

    assert results == [None, None]
    assert calls == [1]
    assert fail_open.failures == {"mine": 1}
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]


def test_a_hook_that_works_returns_its_value() -> None:
    fail_open = FailOpen()

    assert fail_open.wrap("mine", lambda value, more=0: value + more)(1, more=2) == 3
    assert not fail_open.failures


def test_system_exit_propagates() -> None:
    def leave() -> None:
        raise SystemExit(3)

    try:
        FailOpen().wrap("mine", leave)()
    except SystemExit as leaving:
        code = leaving.code

    assert code == 3


def test_only_a_hook_of_an_own_thread_may_catch_system_exit() -> None:
    def leave() -> None:
        raise SystemExit(3)

    fail_open = FailOpen()

    assert fail_open.wrap("listener", leave, BaseException)() is None
    assert fail_open.failures == {"listener": 1}


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), ValueError("a bug")])
def test_a_thread_that_raises_is_counted_logged_and_starts_over(caplog, error) -> None:
    left = [error, error]

    def body() -> None:
        if left:
            raise left.pop()

    fail_open = FailOpen()
    thread = fail_open.thread("watch", body, pause_seconds=0.0)
    thread.start()

    assert thread.join(30)
    assert left == []
    assert fail_open.failures == {"watch thread": 2}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert type(error).__name__ in caplog.records[0].message


def test_a_thread_survives_an_exception_that_another_thread_sets() -> None:
    stop, seen = threading.Event(), []

    def body() -> None:
        seen.append(threading.get_ident())
        while not stop.wait(0.001):
            pass

    fail_open = FailOpen()
    thread = fail_open.thread("watch", body, pause_seconds=0.0)
    thread.start()
    for number in (1, 2):
        wait_until(lambda number=number: len(seen) == number)
        target = ctypes.c_ulong(seen[-1])
        assert ctypes.pythonapi.PyThreadState_SetAsyncExc(target, ctypes.py_object(SystemExit)) == 1
    wait_until(lambda: len(seen) == 3)

    num_dead = fail_open.num_dead_threads
    stop.set()
    assert thread.join(30)
    assert fail_open.failures == {"watch thread": 2}
    assert num_dead == fail_open.num_dead_threads == 0


def test_a_thread_that_always_fails_ends_and_is_counted_as_dead_until_it_is_stopped(caplog) -> None:
    def body() -> None:
        raise SystemExit

    fail_open = FailOpen()
    thread = fail_open.thread("watch", body, pause_seconds=0.0)
    thread.start()
    wait_until(lambda: not thread.is_alive())

    assert fail_open.num_dead_threads == 1
    assert fail_open.has_died("watch")
    assert not fail_open.has_died("http")
    assert fail_open.failures == {"watch thread": MAX_RESTARTS}
    assert caplog.records[-1].levelname == "ERROR"
    assert "watch thread" in caplog.records[-1].message
    assert thread.join(30)
    assert fail_open.num_dead_threads == 0
    assert not fail_open.has_died("watch")


def test_a_thread_that_was_never_started_has_ended_and_is_not_dead() -> None:
    fail_open = FailOpen()

    assert fail_open.thread("watch", lambda: None).join(30)
    assert fail_open.num_dead_threads == 0


def wait_until(condition, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


SHORTAGES = {
    "descriptors": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "descriptors of the host": OSError(errno.ENFILE, os.strerror(errno.ENFILE)),
    "disk": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "processes": BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
    "threads": RuntimeError("can't start new thread"),
    "descriptors, in an import": ImportError(
        f"lib.so: cannot open shared object file: {os.strerror(errno.EMFILE)}"
    ),
}


@pytest.mark.parametrize("error", SHORTAGES.values(), ids=SHORTAGES)
def test_a_hook_that_ran_short_of_something_is_called_again_later(error, caplog) -> None:
    clock = FakeClock()
    fail_open = FailOpen(now=clock)
    results: list[Exception | str] = [error, error, "works", "still works"]

    def body() -> str:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    guarded = fail_open.wrap("mine", body)
    returned = []
    for pause in (0, 0.9, 0.2, 1.9, 0.2, 0):  # in units of the first delay
        clock.seconds += pause * FIRST_RETRY_SECONDS
        returned.append(guarded())

    assert returned == [None, None, None, None, "works", "still works"]
    assert fail_open.failures == {"mine": 2}
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]


def test_a_shortage_behind_another_error_is_found() -> None:
    clock = FakeClock()
    fail_open = FailOpen(now=clock)
    calls = []

    def body() -> None:
        calls.append(1)
        try:
            raise OSError(errno.EMFILE, "Too many open files")
        except OSError as error:
            raise ValueError("cannot read the counters") from error

    guarded = fail_open.wrap("mine", body)
    guarded()
    clock.seconds += 2 * FIRST_RETRY_SECONDS
    guarded()

    assert len(calls) == 2


def test_after_a_shortage_another_error_drops_the_hook(caplog) -> None:
    clock = FakeClock()
    fail_open = FailOpen(now=clock)
    errors = [OSError(errno.EMFILE, "Too many open files"), KeyError("gone")]

    def body() -> None:
        raise errors.pop(0)

    guarded = fail_open.wrap("mine", body)
    for _ in range(4):
        guarded()
        clock.seconds += 10 * FIRST_RETRY_SECONDS

    assert errors == []
    assert fail_open.failures == {"mine": 2}
    assert [entry.levelname for entry in caplog.records] == 2 * ["WARNING"]


def test_the_delay_starts_from_the_shortest_again_once_a_hook_has_worked() -> None:
    clock = FakeClock()
    fail_open = FailOpen(now=clock)
    short = OSError(errno.EMFILE, "Too many open files")
    results: list[Exception | str] = [short, short, "works", short, "works again"]

    def body() -> str:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    guarded = fail_open.wrap("mine", body)
    returned = []
    for pause in (0, 1.1, 2.1, 0, 1.1):  # in units of the first delay
        clock.seconds += pause * FIRST_RETRY_SECONDS
        returned.append(guarded())

    assert returned == [None, None, "works", None, "works again"]


@pytest.mark.parametrize("error", SHORTAGES.values(), ids=SHORTAGES)
def test_a_hook_that_must_not_miss_a_call_is_dropped_by_a_shortage(error, caplog) -> None:
    clock = FakeClock()
    fail_open = FailOpen(now=clock)
    calls = []

    def body() -> None:
        calls.append(1)
        raise error

    guarded = fail_open.wrap("mine", body, is_retried=False)
    for _ in range(3):
        guarded()
        clock.seconds += 10 * FIRST_RETRY_SECONDS

    assert calls == [1]
    assert "was dropped" in caplog.text


DEVICE_OOMS = {
    "the allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 bytes."),
    "the runtime": torch.AcceleratorError("CUDA error: out of memory"),
}


@pytest.mark.parametrize("error", DEVICE_OOMS.values(), ids=DEVICE_OOMS)
def test_a_hook_that_ran_out_of_device_memory_loses_one_call(error, caplog) -> None:
    fail_open = FailOpen()
    results: list[Exception | str] = [error, "works", error, "still works"]

    def body() -> str:
        result = results.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    guarded = fail_open.wrap("mine", body)

    assert [guarded() for _ in range(4)] == [None, "works", None, "still works"]
    assert fail_open.failures == {"mine": 2}
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]


def test_a_hook_that_must_not_miss_a_call_is_dropped_if_the_device_has_no_memory_left() -> None:
    calls = []

    def body() -> None:
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    guarded = FailOpen().wrap("mine", body, is_retried=False)
    guarded()
    guarded()

    assert calls == [1]


def test_a_hook_that_is_kept_loses_only_the_calls_that_raise(caplog) -> None:
    fail_open = FailOpen()

    def body(number: int) -> int:
        if number % 2:
            raise KeyError(number)
        return number

    guarded = fail_open.wrap("mine", body, is_kept=True)

    assert [guarded(number) for number in range(5)] == [0, None, 2, None, 4]
    assert fail_open.failures == {"mine": 2}
    assert [entry.levelname for entry in caplog.records] == ["WARNING"]
    assert "is called again" in caplog.text


def test_a_single_call_returns_its_value_or_none_and_its_failure_is_not_announced_as_a_delay(
    caplog,
) -> None:
    def broken() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    fail_open = FailOpen()

    assert fail_open.call("mine", int, "7") == 7
    assert fail_open.call("mine", broken) is None
    assert fail_open.failures == {"mine": 1}
    assert "called again" not in caplog.text


def test_after_a_shortage_the_delay_doubles_from_ten_seconds_to_five_minutes() -> None:
    clock, calls = FakeClock(), []
    fail_open = FailOpen(now=clock)
    began = clock.seconds

    def body() -> None:
        calls.append(clock.seconds - began)
        raise OSError(errno.ENOSPC, "No space left on device")

    guarded = fail_open.wrap("mine", body)
    for _ in range(1300):
        guarded()
        clock.seconds += 1

    assert calls == [0, 10, 30, 70, 150, 310, 610, 910, 1210]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        *((OSError(number, ""), True) for number in (errno.ENOBUFS, errno.ENOMEM, errno.EDQUOT)),
        (OSError(errno.ENOENT, ""), False),
        (MemoryError(), False),
        (RuntimeError("can't start new thread"), True),
        (RuntimeError("another"), False),
        (ImportError("no module"), False),
        (ValueError("can't start new thread"), False),
    ],
    ids=repr,
)
def test_a_shortage_is_a_lack_of_descriptors_threads_or_disk_space(
    error: Exception, expected: bool
) -> None:
    assert is_shortage(error) is expected
    behind = ValueError("behind it")
    behind.__context__ = error
    assert is_shortage(behind) is expected


def test_a_cycle_of_causes_is_searched_with_an_end() -> None:
    first, second = ValueError(), KeyError()
    first.__cause__, second.__cause__ = second, first

    assert not is_shortage(first)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("HIP error: out of memory"), True),
        (RuntimeError("CUDA error: device-side assert"), False),
        (ValueError("CUDA error: out of memory"), False),
        (type("OutOfMemoryError", (Exception,), {})(), False),
    ],
    ids=repr,
)
def test_only_an_error_of_torch_says_that_the_device_has_no_memory(
    error: Exception, expected: bool
) -> None:
    assert is_out_of_device_memory(error) is expected


def test_the_log_says_whether_a_hook_is_called_again(caplog: pytest.LogCaptureFixture) -> None:
    def fail(error: Exception) -> None:
        raise error

    fail_open = FailOpen()
    fail_open.wrap("a", fail)(KeyError())
    fail_open.wrap("b", fail)(OSError(errno.ENOSPC, ""))
    fail_open.wrap("c", fail)(torch.OutOfMemoryError("x"))
    fail_open.wrap("d", fail, is_kept=True)(KeyError())

    assert [line.partition(";")[0] for line in caplog.messages] == [
        "hook 'a' failed and was dropped",
        "hook 'b' ran short of files, threads or disk space and is called again later",
        "hook 'c' failed and is called again",
        "hook 'd' failed and is called again",
    ]


def test_a_thread_is_named_and_does_not_keep_the_process_alive() -> None:
    seen: list[threading.Thread] = []
    thread = FailOpen().thread("watch", lambda: seen.append(threading.current_thread()))
    before = (thread.was_started, thread.is_alive(), thread.is_dead)

    thread.start()
    ended = thread.join(30)

    assert before == (False, False, False)
    assert (ended, thread.was_started, thread.is_alive(), thread.is_dead) == (
        True,
        True,
        False,
        False,
    )
    assert [(each.name, each.daemon) for each in seen] == [("zerowatch-watch", True)]


def test_a_body_that_does_not_end_in_time_is_reported_by_join() -> None:
    release = threading.Event()
    thread = FailOpen().thread("watch", release.wait)
    thread.start()

    early = thread.join(0.0)
    release.set()

    assert (early, thread.join(30)) == (False, True)


@pytest.fixture
def python_handles_ctrl_c() -> Iterator[None]:
    """Set Python's own handler: torchrun, which another test may have run here, leaves its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handles_ctrl_c")
def test_a_wait_for_a_thread_can_be_repeated_after_ctrl_c() -> None:
    release = threading.Event()
    thread = FailOpen().thread("watch", release.wait)
    thread.start()

    interrupting = threading.Thread(target=interrupt_join, args=(threading.get_ident(),))
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        thread.join(30)
    interrupting.join()
    ended_early = thread.join(0.01)
    was_alive = thread.is_alive()
    release.set()

    assert (ended_early, was_alive, thread.join(30)) == (False, True, True)


def interrupt_join(ident: int) -> None:
    """Send Ctrl-C to a thread once it waits in `MonitoringThread.join`."""

    def is_waiting() -> bool:
        stack = traceback.walk_stack(sys._current_frames()[ident])
        return any(frame.f_code is MonitoringThread.join.__code__ for frame, _ in stack)

    wait_until(is_waiting)
    signal.pthread_kill(ident, signal.SIGINT)


def test_a_thread_may_join_itself() -> None:
    found: list[bool] = []
    fail_open = FailOpen()
    thread = fail_open.thread("watch", lambda: found.append(thread.join(30)))

    thread.start()
    wait_until(lambda: not thread.is_alive())

    assert found == [True]
    assert fail_open.failures == {}


def test_a_thread_that_failed_starts_over_at_once_when_it_is_stopped() -> None:
    is_stopped = False
    calls: list[bool] = []

    def body() -> None:
        calls.append(is_stopped)
        if len(calls) == 1:
            raise ValueError("a bug")

    fail_open = FailOpen()
    thread = fail_open.thread("watch", body, pause_seconds=3600.0)
    thread.start()
    wait_until(lambda: fail_open.failures["watch thread"] == 1)
    is_stopped = True

    assert thread.join(30)
    assert calls == [False, True]


def test_a_thread_may_fail_ten_times_and_still_work(caplog: pytest.LogCaptureFixture) -> None:
    failing = [ValueError("a bug")] * 10

    def body() -> None:
        if failing:
            raise failing.pop()

    fail_open = FailOpen()
    thread = fail_open.thread("watch", body, pause_seconds=0.0)
    thread.start()
    wait_until(lambda: not thread.is_alive())

    assert fail_open.failures == {"watch thread": 10}
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 10
    assert caplog.messages[0].startswith(
        "the watch thread of monitoring was interrupted by ValueError and starts over; "
    )
