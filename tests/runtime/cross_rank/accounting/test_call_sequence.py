"""Tests of `CallSequence`: no call is lost between polls, and dropped calls still count."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import pytest
from fakes.rank_sets import FakeGroup

from zerowatch.runtime.collectives.groups import RECENT_CALLS, CollectiveCall
from zerowatch.runtime.cross_rank.accounting import call_sequence as call_sequence
from zerowatch.runtime.cross_rank.accounting.call_sequence import CallSequence


@pytest.fixture
def group() -> FakeGroup:
    return FakeGroup((0, 1))


@pytest.fixture
def sequence(group: FakeGroup) -> CallSequence:
    return CallSequence(group.rank_set, from_now=False)


def run(group: FakeGroup, num_calls: int) -> None:
    for _ in range(num_calls):
        group.run()


def test_more_calls_than_are_kept_are_all_reported_if_polled_in_between(
    group: FakeGroup, sequence: CallSequence
) -> None:
    for _ in range(3):
        run(group, RECENT_CALLS - 1)
        sequence.poll()

    report = sequence.drain_report()

    assert not sequence.lost
    assert report.prefix_hash is not None
    assert (report.first_issued, len(report.signatures)) == (1, 3 * RECENT_CALLS - 3)
    assert (report.first_timed, len(report.durations)) == (1, 3 * RECENT_CALLS - 3)


def test_calls_not_polled_in_time_are_lost(group: FakeGroup, sequence: CallSequence) -> None:
    run(group, RECENT_CALLS + 1)

    sequence.poll()

    assert sequence.lost


def test_messages_not_polled_in_time_are_lost(group: FakeGroup, sequence: CallSequence) -> None:
    group.run("send")
    sequence.poll()
    for _ in range(RECENT_CALLS + 1):
        group.run("send")

    sequence.poll()

    assert sequence.lost


def test_a_call_in_flight_for_too_long_is_not_compared_and_is_counted_once_it_ended(
    group: FakeGroup, sequence: CallSequence
) -> None:
    stuck = group.issue()
    for _ in range(2):
        run(group, RECENT_CALLS - 1)
        sequence.poll()
    before = list(sequence.unreported)
    report = sequence.drain_report()
    group.settle(stuck, 5)
    sequence.poll()

    assert sequence.lost
    assert before == []
    assert sequence.unreported == [stuck]
    assert (report.first_timed, len(report.durations)) == (2, 2 * RECENT_CALLS - 2)


class Timed:
    """A sequence whose clock is set by hand. Each search for unsettled calls is one poll."""

    def __init__(self, group: FakeGroup) -> None:
        self.seconds = 0.0
        self.sequence = CallSequence(group.rank_set, from_now=False, now=lambda: self.seconds)

    def search(self) -> None:
        self.seconds += call_sequence.SEARCH_SECONDS
        self.sequence.poll()


def test_calls_that_never_settle_block_the_calls_after_them_for_two_searches(
    group: FakeGroup,
) -> None:
    timed = Timed(group)
    sequence = timed.sequence
    stuck = [group.issue(), group.issue("send"), group.issue()]
    run(group, 2)
    stuck.append(group.issue())
    run(group, 3)
    waiting = group.issue()
    timed.search()
    before = sequence.drain_report()
    timed.search()
    reports, is_lost = [sequence.drain_report(), sequence.drain_report()], sequence.lost
    sequence.lost = False
    for call in stuck:
        group.settle(call, 5)
    for _ in range(3):  # nothing has settled after the last call, so it may settle
        timed.search()
    at_end = sequence.drain_report()

    assert len(before.durations) == 0
    assert [(each.first_timed, len(each.durations)) for each in reports] == [(3, 2), (6, 3)]
    assert is_lost
    assert sequence.unreported == stuck
    assert (sequence.lost, list(sequence._in_flight)) == (False, [waiting])
    assert len(at_end.durations) == 0


@pytest.mark.parametrize("settles_early", ["left out", "message"])
def test_a_call_may_settle_after_those_that_are_left_out_or_have_no_number(
    group: FakeGroup, settles_early: str
) -> None:
    timed = Timed(group)
    first = group.issue()
    later = group.issue("send" if settles_early == "message" else "all_reduce")
    later.timed = settles_early == "message"
    later.settle()
    for _ in range(3):
        timed.search()
    group.settle(first, 5)
    report = timed.sequence.drain_report()

    assert not timed.sequence.lost
    assert (report.first_timed, len(report.durations)) == (1, 1 + (settles_early == "left out"))


def test_a_message_in_flight_does_not_block_the_numbered_calls(
    group: FakeGroup, sequence: CallSequence
) -> None:
    message = group.issue("send")
    group.run()
    report = sequence.drain_report()
    group.settle(message, 5)
    sequence.poll()

    assert len(report.durations) == 1
    assert sequence.unreported == [message]
    assert not sequence.lost


def test_settled_calls_that_are_never_drained_become_unreported(
    group: FakeGroup, sequence: CallSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_sequence, "MAX_PENDING_VALUES", 10)
    run(group, 12)

    sequence.poll()

    assert sequence.lost
    assert [call.sequence for call in sequence.unreported] == [1, 2]


def test_messages_that_never_settle_do_not_accumulate(
    group: FakeGroup, sequence: CallSequence
) -> None:
    for _ in range(3):
        for _ in range(RECENT_CALLS // 2):
            group.issue("send")
        sequence.poll()

    assert sequence.lost
    assert len(sequence._deferred) == RECENT_CALLS


def test_a_call_recorded_during_a_poll_is_read_then_or_later(
    group: FakeGroup, sequence: CallSequence
) -> None:
    class BusyRecord(deque[CollectiveCall]):
        def __reversed__(self) -> Iterator[CollectiveCall]:
            calls = super().__reversed__()
            yield next(calls)
            if len(self) == 3:
                group.run()
            yield from calls

        def copy(self) -> deque[CollectiveCall]:
            return deque(self)

    group.rank_set.recent = BusyRecord(maxlen=RECENT_CALLS)
    run(group, 3)

    first = sequence.drain_report()
    second = sequence.drain_report()

    assert len(first.durations) + len(second.durations) == 4
    assert second.first_timed == 1 + len(first.durations)
    assert not sequence.lost


def test_as_many_calls_in_flight_as_are_kept_are_not_lost(
    group: FakeGroup, sequence: CallSequence
) -> None:
    for _ in range(RECENT_CALLS):
        group.issue()

    sequence.poll()

    assert not sequence.lost
    group.issue()
    sequence.poll()
    assert sequence.lost
