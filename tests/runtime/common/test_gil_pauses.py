"""Tests that zerowatch's threads pause between pieces of work, and other threads do not."""

from __future__ import annotations

import threading

import pytest
from fakes.clock import FakeClock, set_clock

from zerowatch.runtime.common import gil_pauses
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.common.gil_pauses import (
    PAUSE_SECONDS,
    SHORT_WORK_SECONDS,
    WORK_SECONDS,
    let_training_run,
    pause_this_thread,
)


class Work:
    """Pieces of work on a thread whose CPU clock is set, and the pauses between them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pauses: list[float] = []
        self._clock, self._wall = FakeClock(), FakeClock()
        set_clock(
            monkeypatch,
            gil_pauses,
            thread_time=self._clock,
            monotonic=self._wall,
            sleep=self.pauses.append,
        )

    def wait(self, seconds: float) -> None:
        self._wall.seconds += seconds

    def work(self, seconds: float) -> None:
        self.wait(seconds)
        self._clock.seconds += seconds
        let_training_run()


@pytest.mark.parametrize("work_seconds", [WORK_SECONDS, SHORT_WORK_SECONDS])
def test_a_thread_pauses_after_each_piece_of_work_of_some_length(
    monkeypatch: pytest.MonkeyPatch, work_seconds: float
) -> None:
    pieces = Work(monkeypatch)
    after = []

    def run() -> None:
        pause_this_thread(work_seconds)
        for share in (0.6, 0.6, 0.6, 0.6, 3.0, 0.1):
            pieces.work(share * work_seconds)
            after.append(len(pieces.pauses))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert after == [0, 1, 1, 2, 3, 3]
    assert set(pieces.pauses) == {PAUSE_SECONDS}


def test_the_training_thread_never_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Work(monkeypatch)

    pieces.work(10 * WORK_SECONDS)

    assert pieces.pauses == []


def test_threads_of_monitoring_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Work(monkeypatch)
    thread = FailOpen().thread("watch", lambda: pieces.work(2 * WORK_SECONDS))

    thread.start()

    assert thread.join(timeout_seconds=120.0)
    assert pieces.pauses == [PAUSE_SECONDS]


def test_time_in_which_the_thread_only_waits_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = Work(monkeypatch)
    after = []

    def run() -> None:
        pause_this_thread()
        for share, waited in ((0.5, 9.0), (0.4, 0.0), (0.2, 0.0)):
            pieces.wait(waited * WORK_SECONDS)
            pieces.work(share * WORK_SECONDS)
            after.append(len(pieces.pauses))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert after == [0, 0, 1]
