"""What the hang watch is told of collectives, with calls made by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerowatch.metrics.catalog.labels import OPS, PHASES
from zerowatch.runtime.collectives.call import CollectiveCall
from zerowatch.runtime.collectives.groups import RankSet
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.cross_rank.hang.evidence import Peer, Sources
from zerowatch.runtime.cross_rank.hang.sources import Activity, hang_sources
from zerowatch.runtime.cross_rank.heartbeats import Heartbeat

MS = 1_000_000
KEY = RankSet((0, 1)).key


class TwoRanks:
    """A process group as the tap knows it."""

    role = "dp"
    busy_until_ns = -(2**63)

    def __init__(self, rank_set: RankSet | None = None) -> None:
        self.rank_set = rank_set or RankSet((0, 1))
        self.rank_set.roles = ["dp"]

    def begin(self) -> CollectiveCall:
        call = CollectiveCall(
            OPS.index("all_reduce"), self, 4096, torch.float32, PHASES.index("backward")
        )
        self.rank_set.issued += 1
        call.sequence = self.rank_set.issued
        self.rank_set.recent.append(call)
        return call


class DeviceEvent:
    """A CUDA event, which no machine without a GPU can record."""

    def __init__(self, *, passed: bool) -> None:
        self.passed = passed

    def query(self) -> bool:
        return self.passed


class Peers:
    """What the exchange has heard of the other ranks."""

    def __init__(self, *beats: Heartbeat) -> None:
        self.peers = {beat.rank: beat for beat in beats}
        self.others_hang = False
        self.told: list[bool] = []

    def tell_of_hang(self, hangs: bool) -> None:
        self.told.append(hangs)


@pytest.fixture
def group() -> TwoRanks:
    return TwoRanks()


def sources(group: TwoRanks, exchange: Any = None) -> Sources:
    return hang_sources(
        rank=0,
        rank_sets=lambda: [group.rank_set],
        exchange=exchange or Peers(),
        folder=lambda: None,
        fail_open=FailOpen(),
    )


def returned(call: CollectiveCall, *, end_ms: int = 7) -> CollectiveCall:
    call.start_ns, call.issued_ns, call.end_ns = 2 * MS, end_ms * MS, end_ms * MS
    return call


def states(group: TwoRanks) -> list[tuple[int, str]]:
    return [(line.sequence, line.state) for line in sources(group).last_calls() or ()]


def test_a_call_that_has_not_returned_is_under_way(group: TwoRanks) -> None:
    returned(group.begin())
    group.begin()

    assert states(group) == [(1, "done"), (2, "under way")]


def test_a_call_passed_by_in_a_graph_capture_is_not_under_way_for_ever(group: TwoRanks) -> None:
    group.begin()  # was never noted as returned
    returned(group.begin())

    assert states(group) == [(1, "done"), (2, "done")]


def test_a_call_of_another_group_of_the_same_ranks_does_not_end_one(group: TwoRanks) -> None:
    group.begin()
    returned(TwoRanks(group.rank_set).begin())

    assert states(group) == [(1, "under way"), (2, "done")]


def test_an_asynchronous_call_is_under_way_until_its_end_is_noted(group: TwoRanks) -> None:
    call = returned(group.begin(), end_ms=0)

    before = states(group)
    call.end_ns = 9 * MS

    assert (before, states(group)) == ([(1, "under way")], [(1, "done")])


def test_a_call_on_a_device_is_under_way_until_its_event_has_passed(group: TwoRanks) -> None:
    for passed in (True, False):
        call = returned(group.begin())
        call.start_event = DeviceEvent(passed=True)
        call.end_event = DeviceEvent(passed=passed)

    assert states(group) == [(1, "done"), (2, "under way")]


def test_a_device_call_that_the_watch_gave_up_is_still_under_way(group: TwoRanks) -> None:
    call = returned(group.begin())
    call.start_event, call.end_event = DeviceEvent(passed=True), DeviceEvent(passed=False)
    call.timed = False
    call.settle()

    assert states(group) == [(1, "under way")]


def test_the_events_of_a_settled_call_are_not_asked_as_they_serve_others(group: TwoRanks) -> None:
    call = returned(group.begin())
    call.start_event = call.end_event = DeviceEvent(passed=False)
    call.settle()

    assert states(group) == [(1, "done")]


def test_a_line_tells_all_of_a_call(group: TwoRanks) -> None:
    returned(group.begin()).settle()

    (line,) = sources(group).last_calls() or ()

    assert (line.group, line.role, line.sequence) == (group.rank_set.key, "dp", 1)
    assert (line.op, line.payload_bytes, line.dtype) == ("all_reduce", 4096, "float32")
    assert (line.phase, line.seconds) == ("backward", pytest.approx(0.005))


def test_only_the_last_calls_are_told_and_all_that_are_under_way(group: TwoRanks) -> None:
    returned(group.begin(), end_ms=0)
    for _ in range(500):
        returned(group.begin())

    lines = states(group)

    assert lines[0] == (1, "under way")
    assert [number for number, _ in lines[1:]] == list(range(438, 502))


def test_activity_is_when_a_call_was_seen_to_begin_or_end(group: TwoRanks) -> None:
    now = [100]
    activity = Activity(lambda: [group.rank_set], now_ns=lambda: now[0])
    times = [activity()]

    def look_at(moment: int) -> None:
        now[0] = moment
        times.append(activity())

    look_at(200)
    call = group.begin()
    look_at(300)
    look_at(400)
    returned(call, end_ms=0)
    look_at(500)
    call.end_ns = 5 * MS
    look_at(600)
    call.settle()
    look_at(700)
    returned(group.begin())
    look_at(800)

    assert times == [100, 100, 300, 300, 500, 600, 600, 800]


def test_peers_are_all_others_that_were_heard(group: TwoRanks) -> None:
    beats = [
        Heartbeat(rank=rank, host="node", age_seconds=3.0, arrived={KEY: 5}, pause="eval")
        for rank in (0, 1)
    ]

    told = sources(group, Peers(*beats)).peers()

    heard = Peer(rank=1, host="node", heartbeat_age_seconds=3.0, arrived={KEY: 5}, pause="eval")
    assert told == {1: heard}
    assert sources(group, Peers(beats[0])).peers() is None


def begun(group: TwoRanks) -> None:
    returned(group.begin())
    group.begin()


def ended(group: TwoRanks) -> None:
    begun(group)
    returned(group.rank_set.recent[-1])


def in_the_background(group: TwoRanks) -> None:
    returned(group.begin(), end_ms=0)


def before_a_message(group: TwoRanks) -> None:
    """A message between two members has no number, and may be sent by a thread of its own."""
    begun(group)
    message = returned(group.begin())
    message.sequence = 0
    group.rank_set.issued -= 1


def message_only(group: TwoRanks) -> None:
    group.begin().sequence = 0


WAITS = {begun: True, in_the_background: True, before_a_message: True, ended: False}


@pytest.mark.parametrize(("issue", "waits"), [*WAITS.items(), (message_only, False)])
def test_a_group_waits_while_its_last_numbered_collective_is_under_way(
    group: TwoRanks, issue: Any, waits: bool
) -> None:
    issue(group)

    (line,) = sources(group).groups() or ()

    assert (line.members, line.issued, line.waits) == ((0, 1), group.rank_set.issued, waits)


def test_the_others_are_told_of_a_hang_and_of_its_end(group: TwoRanks) -> None:
    exchange = Peers()
    tell = sources(group, exchange).tell_others

    tell(True)
    tell(False)

    assert exchange.told == [True, False]
