"""The delay between attempts doubles up to its maximum, and starts over after a reset."""

from __future__ import annotations

import pytest

from zerowatch.metrics.backoff import Backoff


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def delay(backoff: Backoff, clock: Clock) -> float:
    """Start a delay and return how many seconds it lasts."""
    began = clock.seconds
    backoff.start_delay()
    while not backoff.is_due:
        clock.seconds += 0.5
    return clock.seconds - began


def test_the_first_attempt_is_due_at_once():
    assert Backoff(3, 10, Clock()).is_due


def test_delays_double_up_to_the_maximum_and_begin_anew_after_a_reset():
    clock = Clock()
    backoff = Backoff(3, 10, clock)

    delays = [delay(backoff, clock) for _ in range(4)]
    backoff.reset()

    assert delays == [3, 6, 10, 10]
    assert delay(backoff, clock) == 3


@pytest.mark.parametrize(("seconds", "is_due"), [(2.99, False), (3, True), (3.01, True)])
def test_an_attempt_is_due_when_the_delay_is_over(seconds, is_due):
    clock = Clock()
    backoff = Backoff(3, 10, clock)
    backoff.start_delay()

    clock.seconds += seconds

    assert backoff.is_due == is_due


def test_a_reset_does_not_end_a_delay():
    clock = Clock()
    backoff = Backoff(3, 10, clock)
    backoff.start_delay()

    backoff.reset()

    assert not backoff.is_due
