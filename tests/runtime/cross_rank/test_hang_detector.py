"""When training hangs, with a clock turned by hand."""

from __future__ import annotations

import pytest

from zerowatch.runtime.cross_rank.hang.detector import Detector, Look, State


class Clockwork:
    """A detector with a limit of 30 s, looked at each second of a clock turned by hand."""

    def __init__(self, *, steps: int = 3, step_seconds: float = 1.0) -> None:
        self.detector = Detector(30.0)
        self.now = self.activity = 1000.0
        self.excused = False
        for _ in range(steps):
            self.detector.step_ended(step_seconds)

    def look(self, *, paused: bool = False, told: bool = False) -> State:
        return self.detector.look(
            Look(
                now_ns=int(self.now * 1e9),
                activity_ns=int(self.activity * 1e9),
                paused=paused,
                others_hang=told,
                excused=lambda: self.excused,
            )
        )

    def pass_seconds(self, seconds: int, *, paused: bool = False) -> list[State]:
        """Return what the looks of so many seconds found, if anything."""
        found = []
        for _ in range(seconds):
            self.now += 1
            found.append(self.look(paused=paused))
        return [finding for finding in found if finding is not State.NOTHING]

    def move(self) -> None:
        self.activity = self.now


def test_a_hang_is_found_once_when_its_limit_is_reached_and_once_at_a_second_limit() -> None:
    clockwork = Clockwork()

    found = [clockwork.pass_seconds(s) for s in (29, 1, 29, 1, 200)]

    assert found == [[], [State.HANG], [], [State.LASTING], []]


@pytest.mark.parametrize(("steps", "found"), [(2, []), (3, [State.HANG])])
def test_nothing_is_a_hang_before_three_steps(steps: int, found: list[State]) -> None:
    assert Clockwork(steps=steps).pass_seconds(40) == found


def test_the_limit_is_ten_times_the_median_of_the_last_steps_where_that_is_more() -> None:
    clockwork = Clockwork(steps=100, step_seconds=60.0)
    for seconds in [7.0] * 40 + [500.0] * 24:  # 64 steps: those before are forgotten
        clockwork.detector.step_ended(seconds)

    assert clockwork.detector.limit_seconds == 70.0
    assert clockwork.pass_seconds(69) == []
    assert clockwork.pass_seconds(1) == [State.HANG]


def test_progress_starts_the_time_anew() -> None:
    clockwork = Clockwork()

    clockwork.pass_seconds(29)
    clockwork.move()

    assert clockwork.pass_seconds(29) == []
    assert clockwork.pass_seconds(1) == [State.HANG]


def test_time_in_a_pause_does_not_count() -> None:
    clockwork = Clockwork()

    assert clockwork.pass_seconds(500, paused=True) == []
    assert clockwork.pass_seconds(29) == []
    assert clockwork.pass_seconds(1) == [State.HANG]


def test_compilation_excuses_and_is_looked_at_again_a_limit_later() -> None:
    clockwork = Clockwork()
    clockwork.excused = True

    assert clockwork.pass_seconds(100) == []
    clockwork.excused = False

    assert clockwork.pass_seconds(19) == []  # it was looked at after 30, 60 and 90 seconds
    assert clockwork.pass_seconds(1) == [State.HANG]


def test_what_excuses_puts_off_the_second_limit_by_a_limit() -> None:
    clockwork = Clockwork()
    clockwork.pass_seconds(40)

    clockwork.excused = True
    excused = clockwork.pass_seconds(25)
    clockwork.excused = False

    assert excused == []
    assert clockwork.pass_seconds(24) == []  # it was looked at after 60 seconds
    assert clockwork.pass_seconds(1) == [State.LASTING]


def test_the_time_in_which_nobody_could_look_does_not_count() -> None:
    clockwork = Clockwork()
    clockwork.pass_seconds(10)

    clockwork.now += 3600  # the whole process was stopped

    assert clockwork.look() is State.NOTHING
    assert clockwork.pass_seconds(19) == []
    assert clockwork.pass_seconds(1) == [State.HANG]


def test_progress_after_a_hang_is_told_and_arms_again() -> None:
    clockwork = Clockwork()
    clockwork.pass_seconds(30)

    clockwork.move()

    assert clockwork.pass_seconds(1) == [State.MOVED]
    assert clockwork.pass_seconds(29) == [State.HANG]


@pytest.mark.parametrize(("steps", "later"), [(0, []), (3, [State.HANG, State.LASTING])])
def test_a_rank_that_is_told_reports_once_before_its_own_limit(
    steps: int, later: list[State]
) -> None:
    clockwork = Clockwork(steps=steps)
    clockwork.pass_seconds(5)

    told = [clockwork.look(told=True) for _ in range(3)]

    assert told == [State.TOLD, State.NOTHING, State.NOTHING]
    assert clockwork.pass_seconds(100) == later


def test_a_notice_that_stays_up_is_no_news_after_progress() -> None:
    clockwork = Clockwork()
    clockwork.pass_seconds(5)
    clockwork.look(told=True)
    clockwork.move()

    found = [clockwork.look(told=True) for _ in range(3)]

    assert found == [State.MOVED, State.NOTHING, State.NOTHING]
