"""Tests of listeners of a watch: slow listeners, blocked listeners, and listeners that raise."""

from __future__ import annotations

import threading
import time

import pytest
from fakes.clock import FakeClock

from zerowatch.runtime.common.fail_open import FIRST_RETRY_SECONDS, FailOpen
from zerowatch.runtime.monitor.subscriptions import MAX_WAITING, Subscriptions


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def fail_open(clock: FakeClock) -> FailOpen:
    return FailOpen(now=clock)


@pytest.fixture
def subscriptions(fail_open: FailOpen) -> Subscriptions:
    return Subscriptions(fail_open)


def test_listeners_have_got_every_record_in_order_after_close(subscriptions: Subscriptions) -> None:
    first, second = [], []
    subscriptions.add(first.append)
    subscriptions.add(second.append)

    for number in range(100):
        subscriptions.enqueue(number)
    subscriptions.close()

    assert first == second == list(range(100))
    assert subscriptions.dropped == 0


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ZeroDivisionError])
def test_a_listener_that_raises_anything_is_dropped_and_the_others_go_on(
    subscriptions: Subscriptions, fail_open: FailOpen, error: type[BaseException]
) -> None:
    def leave(_: object) -> None:
        raise error

    seen = []
    subscriptions.add(leave)
    subscriptions.add(seen.append)

    for number in range(3):
        subscriptions.enqueue(number)
    subscriptions.close()

    assert seen == [0, 1, 2]
    assert fail_open.failures == {"listener": 1}


def test_what_fails_at_each_call_and_at_the_end_is_logged_once(
    subscriptions: Subscriptions, fail_open: FailOpen, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise OSError("no tracking server")

    subscriptions.add_kept("sink", fail, fail)
    for number in range(3):
        subscriptions.enqueue(number)
    subscriptions.close()

    assert fail_open.failures == {"sink": 4}
    assert len(caplog.records) == 1


def test_records_that_a_blocked_listener_never_gets_are_counted_and_logged(
    subscriptions: Subscriptions, caplog: pytest.LogCaptureFixture
) -> None:
    entered, release = threading.Event(), threading.Event()
    seen = []

    def block(record: object) -> None:
        seen.append(record)
        entered.set()
        release.wait()

    subscriptions.add(block)
    subscriptions.enqueue(0)
    assert entered.wait(30)
    for number in range(MAX_WAITING + 5):
        subscriptions.enqueue(number)
    dropped_before = subscriptions.dropped
    subscriptions.close(timeout_seconds=0.01)
    dropped = subscriptions.dropped
    release.set()

    assert (dropped_before, dropped, seen) == (5, MAX_WAITING + 5, [0])
    assert len(caplog.records) == 2
    assert f"{MAX_WAITING} record(s)" in caplog.records[-1].message


def test_a_close_after_ctrl_c_waits_again_for_the_listeners(
    subscriptions: Subscriptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, release = threading.Event(), threading.Event()
    seen: list[object] = []

    def block(record: object) -> None:
        entered.set()
        release.wait()
        seen.append(record)

    def interrupted(timeout_seconds: float) -> bool:
        raise KeyboardInterrupt

    subscriptions.add_kept("sink", block, lambda: seen.append("end"))
    for number in range(2):
        subscriptions.enqueue(number)
    assert entered.wait(30)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(subscriptions._thread, "join", interrupted)
        subscriptions.close(30)
    seen_before = list(seen)
    subscriptions.enqueue(2)  # too late
    release.set()
    subscriptions.close(30)

    assert (seen_before, seen) == ([], [0, 1, "end"])
    assert subscriptions.dropped == 0


def test_a_second_close_does_not_wait_again_for_a_blocked_listener(
    subscriptions: Subscriptions, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    subscriptions.add(lambda record: release.wait())
    subscriptions.enqueue(0)

    subscriptions.close(timeout_seconds=0.01)
    subscriptions.close(timeout_seconds=3600)
    release.set()

    assert len(caplog.records) == 1


def test_no_thread_is_started_without_a_listener(subscriptions: Subscriptions) -> None:
    before = threading.active_count()

    subscriptions.enqueue(0)
    subscriptions.close()

    assert threading.active_count() == before


def test_a_listener_may_close_the_subscriptions_itself(subscriptions: Subscriptions) -> None:
    subscriptions.add(lambda _: subscriptions.close())

    subscriptions.enqueue(0)

    end = time.monotonic() + 120
    while not subscriptions._closed:
        assert time.monotonic() < end
        time.sleep(0.001)


def test_a_listener_that_the_system_had_no_thread_for_gets_every_record_in_order_later(
    subscriptions: Subscriptions, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        subscriptions.add(seen.append)
        subscriptions.enqueue(0)
    subscriptions.enqueue(1)  # too early
    assert not subscriptions._thread.was_started
    clock.seconds += 1.1 * FIRST_RETRY_SECONDS
    subscriptions.enqueue(2)
    subscriptions.close()

    assert seen == [0, 1, 2]
    assert subscriptions.dropped == 0


def test_records_of_a_listener_that_never_got_a_thread_are_counted_at_the_end(
    subscriptions: Subscriptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    subscriptions.add(lambda record: None)
    for number in range(3):
        subscriptions.enqueue(number)
    subscriptions.close()

    assert subscriptions.dropped == 3
    assert "3 record(s)" in caplog.text


def test_the_first_calls_of_two_threads_start_one_thread(
    subscriptions: Subscriptions, fail_open: FailOpen, monkeypatch: pytest.MonkeyPatch
) -> None:
    handled: list[str] = []
    start, starts, is_started = threading.Thread.start, [], threading.Event()
    second = threading.Thread(
        target=lambda: subscriptions.enqueue_call(lambda: handled.append("second"))
    )

    def start_slowly(thread: threading.Thread) -> None:
        starts.append(thread.name)
        if len(starts) == 1:
            start(second)
            is_started.wait(0.1)  # the system takes a while
        start(thread)
        is_started.set()

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_slowly)
        subscriptions.enqueue_call(lambda: handled.append("first"))
        second.join()
    subscriptions.close()

    assert starts == ["zerowatch-listener"]
    assert sorted(handled) == ["first", "second"]
    assert not fail_open.failures


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
