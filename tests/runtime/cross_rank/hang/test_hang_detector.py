"""Tests of `HangDetector`: when training counts as hanging, by a fake clock."""

from __future__ import annotations

import pytest

from zerowatch.runtime.cross_rank.hang.hang_detector import HangDetector, HangState, ProgressSample


class Clockwork:
    """A detector with a limit of 30 s, updated each second of a fake clock."""

    def __init__(self, *, steps: int = 3, step_seconds: float = 1.0) -> None:
        self.detector = HangDetector(30.0)
        self.now = self.activity = 1000.0
        self.is_busy = False
        for _ in range(steps):
            self.detector.add_step(step_seconds)

    def check(self, *, is_pause: bool = False, others_hang: bool = False) -> HangState:
        sample = ProgressSample(
            now_ns=int(self.now * 1e9),
            activity_ns=int(self.activity * 1e9),
            is_pause=is_pause,
            others_hang=others_hang,
        )
        return self.detector.update(sample, lambda: self.is_busy)

    def pass_seconds(self, seconds: int, *, is_pause: bool = False) -> list[HangState]:
        """Return the changes of state within so many seconds."""
        found = []
        for _ in range(seconds):
            self.now += 1
            found.append(self.check(is_pause=is_pause))
        return [state for state in found if state is not HangState.UNCHANGED]

    def progress(self) -> None:
        self.activity = self.now


def test_a_hang_is_found_once_when_its_limit_is_reached_and_once_at_a_second_limit() -> None:
    clockwork = Clockwork()

    found = [clockwork.pass_seconds(s) for s in (29, 1, 29, 1, 200)]

    assert found == [[], [HangState.HANG], [], [HangState.ABORT_LIMIT], []]


@pytest.mark.parametrize(("steps", "found"), [(2, []), (3, [HangState.HANG])])
def test_nothing_is_a_hang_before_three_steps(steps: int, found: list[HangState]) -> None:
    assert Clockwork(steps=steps).pass_seconds(40) == found


def test_the_limit_is_ten_times_the_median_of_the_last_steps_where_that_is_more() -> None:
    clockwork = Clockwork(steps=100, step_seconds=60.0)
    for seconds in [7.0] * 40 + [500.0] * 24:  # 64 steps: those before are forgotten
        clockwork.detector.add_step(seconds)

    assert clockwork.detector.limit_seconds == 70.0
    assert clockwork.pass_seconds(69) == []
    assert clockwork.pass_seconds(1) == [HangState.HANG]


def test_progress_restarts_the_time() -> None:
    clockwork = Clockwork()

    clockwork.pass_seconds(29)
    clockwork.progress()

    assert clockwork.pass_seconds(29) == []
    assert clockwork.pass_seconds(1) == [HangState.HANG]


def test_time_in_a_pause_does_not_count() -> None:
    clockwork = Clockwork()

    assert clockwork.pass_seconds(500, is_pause=True) == []
    assert clockwork.pass_seconds(29) == []
    assert clockwork.pass_seconds(1) == [HangState.HANG]


def test_a_busy_process_is_checked_again_a_limit_later() -> None:
    clockwork = Clockwork()
    clockwork.is_busy = True

    assert clockwork.pass_seconds(100) == []
    clockwork.is_busy = False

    assert clockwork.pass_seconds(19) == []  # it was checked after 30, 60 and 90 seconds
    assert clockwork.pass_seconds(1) == [HangState.HANG]


def test_a_busy_process_delays_the_second_limit_by_a_limit() -> None:
    clockwork = Clockwork()
    clockwork.pass_seconds(40)

    clockwork.is_busy = True
    busy = clockwork.pass_seconds(25)
    clockwork.is_busy = False

    assert busy == []
    assert clockwork.pass_seconds(24) == []  # it was checked after 60 seconds
    assert clockwork.pass_seconds(1) == [HangState.ABORT_LIMIT]


def test_the_time_without_samples_does_not_count() -> None:
    clockwork = Clockwork()
    clockwork.pass_seconds(10)

    clockwork.now += 3600  # the whole process was stopped

    assert clockwork.check() is HangState.UNCHANGED
    assert clockwork.pass_seconds(19) == []
    assert clockwork.pass_seconds(1) == [HangState.HANG]


def test_progress_after_a_hang_is_reported_and_restarts_detection() -> None:
    clockwork = Clockwork()
    clockwork.pass_seconds(30)

    clockwork.progress()

    assert clockwork.pass_seconds(1) == [HangState.RESUMED]
    assert clockwork.pass_seconds(29) == [HangState.HANG]


@pytest.mark.parametrize(
    ("steps", "later"), [(0, []), (3, [HangState.HANG, HangState.ABORT_LIMIT])]
)
def test_an_announced_hang_is_reported_once_before_the_own_limit(
    steps: int, later: list[HangState]
) -> None:
    clockwork = Clockwork(steps=steps)
    clockwork.pass_seconds(5)

    states = [clockwork.check(others_hang=True) for _ in range(3)]

    assert states == [HangState.ANNOUNCED, HangState.UNCHANGED, HangState.UNCHANGED]
    assert clockwork.pass_seconds(100) == later


def test_an_announcement_that_lasts_is_not_reported_again_after_progress() -> None:
    clockwork = Clockwork()
    clockwork.pass_seconds(5)
    clockwork.check(others_hang=True)
    clockwork.progress()

    found = [clockwork.check(others_hang=True) for _ in range(3)]

    assert found == [HangState.RESUMED, HangState.UNCHANGED, HangState.UNCHANGED]


@pytest.mark.parametrize(("gap", "silent"), [(5, 15.0), (6, 10.0)])
def test_a_gap_of_more_than_five_seconds_between_samples_does_not_count(
    gap: int, silent: float
) -> None:
    clockwork = Clockwork()
    clockwork.check()
    clockwork.progress()
    clockwork.pass_seconds(10)

    clockwork.now += gap
    clockwork.check()

    assert clockwork.detector.silent_seconds == silent


@pytest.mark.parametrize(("seconds", "state"), [(1, HangState.UNCHANGED), (2, HangState.ANNOUNCED)])
def test_an_announced_hang_counts_after_two_seconds_without_own_progress(
    seconds: int, state: HangState
) -> None:
    clockwork = Clockwork()
    clockwork.check()
    clockwork.pass_seconds(seconds - 1)
    clockwork.now += 1

    assert clockwork.check(others_hang=True) is state


def test_before_the_first_step_the_limit_is_the_setting_and_nothing_was_silent() -> None:
    detector = HangDetector(30.0)

    assert (detector.limit_seconds, detector.silent_seconds, detector.num_steps) == (30.0, 0.0, 0)


def test_an_announcement_that_ended_is_reported_again_when_it_comes_back() -> None:
    clockwork = Clockwork()
    clockwork.pass_seconds(5)
    states = [clockwork.check(others_hang=True)]
    clockwork.progress()
    clockwork.now += 1
    states.append(clockwork.check())
    clockwork.pass_seconds(4)

    assert [*states, clockwork.check(others_hang=True)] == [
        HangState.ANNOUNCED,
        HangState.RESUMED,
        HangState.ANNOUNCED,
    ]
