"""Tests of batches of calls: when they can be read, and what is given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from zerowatch.metrics.catalog.labels import OPS
from zerowatch.runtime.collectives.call_batch import CallBatch
from zerowatch.runtime.collectives.groups import BEFORE_ALL, CollectiveCall, StreamWait


class Event:
    """An event of a device at a time in milliseconds; reached unless the test says otherwise."""

    def __init__(self, at_ms: float = 0.0, *, reached: bool = True) -> None:
        self.at_ms, self.reached = at_ms, reached

    def query(self) -> bool:
        return self.reached

    def elapsed_time(self, end: Event) -> float:
        if not (self.reached and end.reached):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end.at_ms - self.at_ms


class Pool:
    """Notes the events that are released."""

    def __init__(self) -> None:
        self.released: list[Any] = []

    def release(self, event: Any) -> None:
        self.released.append(event)


GROUP: Any = SimpleNamespace(busy_until_ns=BEFORE_ALL, maybe_busy_until_ns=BEFORE_ALL)


def call(
    start: Event | None = None, end: Event | None = None, *, end_ns: int = 0, **fields: Any
) -> CollectiveCall:
    made: Any = CollectiveCall(OPS.index("all_reduce"), GROUP, 8, None, 0)
    made.start_event, made.end_event, made.end_ns = start, end, end_ns
    made.start_ns = made.issued_ns = 5
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def batch(*calls: CollectiveCall, anchor: Event | None = None) -> CallBatch:
    given: Any = anchor
    return CallBatch(list(calls), given)


NOT_REACHED = Event(reached=False)


@pytest.mark.parametrize(
    ("calls", "anchor", "settled"),
    [
        ([], None, True),
        ([call(end_ns=7)], None, True),
        ([call(end_ns=7), call()], None, False),  # the host has not seen its end
        ([call(timed=False)], None, True),
        ([call(Event(), Event())], Event(), True),
        ([call(Event(), Event())], NOT_REACHED, False),
        ([call(Event(), NOT_REACHED)], Event(), False),
        ([call(Event(), None)], Event(), False),
        ([call(Event(), None, timed=False)], Event(), True),
    ],
)
def test_a_batch_is_settled_once_each_end_is_known(
    calls: list[CollectiveCall], anchor: Event | None, settled: bool
) -> None:
    assert batch(*calls, anchor=anchor).settled() is settled


def test_times_are_relative_to_the_anchor_and_events_are_released() -> None:
    anchor, start, end = Event(100), Event(70), Event(90)
    asynchronous = call(start, end)
    blocking = call(Event(60), anchor, issued_ns=6)
    by_host = call(end_ns=7)
    pool: Any = Pool()

    batch(asynchronous, blocking, by_host, anchor=anchor).read_events(pool)

    times = [(each.start_ns, each.end_ns, each.issued_ns) for each in (asynchronous, blocking)]
    assert times == [(-30_000_000, -10_000_000, -30_000_000), (-40_000_000, 0, 0)]
    assert (by_host.start_ns, by_host.end_ns) == (5, 7)
    assert pool.released == [start, end, blocking.start_event, anchor]


def test_nothing_is_read_before_the_device_has_passed_the_anchor() -> None:
    one, untimed = call(Event(70), Event(90)), call(timed=False)
    pool: Any = Pool()

    batch(one, untimed, anchor=NOT_REACHED).read_events(pool)

    assert (one.start_ns, one.end_ns, pool.released) == (5, 0, [])
    assert (one.settled, untimed.settled) == (False, True)


def test_a_call_without_an_end_only_gives_its_start_back() -> None:
    anchor, start = Event(100), Event(70)
    untimed = call(start, None, timed=False)
    pool: Any = Pool()

    batch(untimed, anchor=anchor).read_events(pool)

    assert (untimed.start_ns, pool.released) == (5, [start, anchor])


def test_a_call_whose_end_is_marked_but_not_reached_stays_untimed_and_loses_no_other() -> None:
    anchor, start = Event(100), Event(70)
    late, other = call(start, NOT_REACHED), call(Event(60), Event(90))
    pool: Any = Pool()

    batch(late, other, anchor=anchor).read_events(pool)

    assert (late.timed, late.is_lost, late.start_ns) == (False, False, 5)
    assert (other.timed, other.end_ns) == (True, -10_000_000)
    assert start in pool.released
    assert NOT_REACHED not in pool.released


def test_one_wait_for_two_calls_counts_each_instant_once() -> None:
    anchor, waiting = Event(100), Event(60)
    wait = StreamWait(waiting, 2)  # type: ignore[arg-type]
    first = call(Event(50), Event(80), stream_wait=wait)
    second = call(Event(50), Event(95), stream_wait=wait)
    pool: Any = Pool()

    batch(first, second, anchor=anchor).read_events(pool)

    assert (first.wait_ns, second.wait_ns) == (-40_000_000, -20_000_000)
    assert wait.num_calls == 0
    assert pool.released.count(waiting) == 1


def test_a_wait_at_the_anchor_still_is_a_wait() -> None:
    anchor = Event(100)
    one = call(Event(50), Event(120), stream_wait=StreamWait(Event(100), 1))  # type: ignore[arg-type]
    pool: Any = Pool()

    batch(one, anchor=anchor).read_events(pool)

    assert one.wait_ns == 1


def test_a_wait_that_the_device_has_not_reached_begins_after_all_else() -> None:
    anchor, wait = Event(100), StreamWait(NOT_REACHED, 2)  # type: ignore[arg-type]
    one = call(Event(50), Event(80), stream_wait=wait)
    pool: Any = Pool()

    batch(one, anchor=anchor).read_events(pool)

    assert one.wait_ns == 2**63 - 1
    assert (wait.num_calls, NOT_REACHED in pool.released) == (1, False)


def test_a_discarded_batch_has_no_times_and_none_to_wait_for() -> None:
    calls = [call(Event(), Event()), call(timed=False)]
    dropped = batch(*calls, anchor=Event())

    assert dropped.discard() == 2
    assert [(each.timed, each.settled, each.is_lost) for each in calls] == [
        (False, True, False),
        (False, True, False),
    ]
    assert (dropped.anchor, dropped.settled()) == (None, True)


def test_timed_calls_of_a_lost_batch_are_lost() -> None:
    calls = [call(Event(), Event()), call(end_ns=7), call(timed=False)]
    lost = batch(*calls, anchor=Event())

    assert lost.lose() == 2
    assert [each.is_lost for each in calls] == [True, True, False]
    assert lost.settled()


@pytest.mark.parametrize(
    ("one", "anchor", "late", "timed", "is_lost"),
    [
        (call(Event(), Event()), Event(), 0, True, False),
        (call(Event(), Event()), NOT_REACHED, 1, False, True),
        (call(Event(), NOT_REACHED), Event(), 1, False, True),
        (call(Event(), None), Event(), 1, False, True),
        (call(Event(), None, is_bound=True), Event(), 0, False, False),  # nobody has waited
        (call(Event(), NOT_REACHED, is_bound=True), Event(), 1, False, True),
        (call(end_ns=7), NOT_REACHED, 0, True, False),
        (call(), None, 1, False, True),
        (call(timed=False), None, 0, False, False),
    ],
)
def test_calls_that_cannot_be_read_in_time_are_lost(
    one: CollectiveCall, anchor: Event | None, late: int, timed: bool, is_lost: bool
) -> None:
    assert batch(one, anchor=anchor).expire() == late
    assert (one.timed, one.is_lost) == (timed, is_lost)
