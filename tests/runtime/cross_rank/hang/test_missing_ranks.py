"""Tests of which ranks a hang waits for, and of the names of calls and sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fakes.hangs import CALL, KEY, call, evidence, peer

from zerowatch.runtime.cross_rank.exchange.rank_messages import Heartbeat
from zerowatch.runtime.cross_rank.hang.hang_evidence import RankSetSummary
from zerowatch.runtime.cross_rank.hang.missing_ranks import (
    MissingRanks,
    awaited_rank,
    call_name,
    calls_in_flight,
    missing_ranks,
    size_text,
    sort_by_silence,
    waiting_ranks,
)

OTHER = "1-ffffffff"
OTHER_CALL = "all_reduce number 5 of group tp (64 MiB, backward)"


def two_groups(*peers: Heartbeat, **changes: Any) -> Any:
    """Rank 0 waits in call 5 of a group with rank 1, and in call 1234 of a group with 2 and 3."""
    found = evidence([call(5, key=OTHER, role="tp"), call()], list(peers), **changes)
    rank_sets = {
        KEY: RankSetSummary(key=KEY, role="dp", members=(0, 2, 3), issued=1234),
        OTHER: RankSetSummary(key=OTHER, role="tp", members=(0, 1), issued=5),
    }
    return replace(found, rank_sets=rank_sets)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (100, "100 bytes"),
        (1023, "1023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1024 KiB"),
        (2**20, "1 MiB"),
        (64 * 2**20, "64 MiB"),
        (2**30, "1 GiB"),
        (5 * 2**40, "5120 GiB"),
    ],
)
def test_a_size_has_its_binary_unit(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, CALL),
        ({"sequence": 0, "op": "send"}, "send of group dp (64 MiB, backward)"),
        (
            {"sequence": 7, "op": "barrier", "payload_bytes": 0, "phase": "eval"},
            "barrier number 7 of group dp (eval)",
        ),
        (
            {"is_own": True, "payload_bytes": 8},
            "all_reduce number 1234 of group dp (zerowatch's own, 8 bytes, backward)",
        ),
    ],
)
def test_a_call_is_named_as_in_the_reports_of_other_ranks(
    changes: dict[str, Any], name: str
) -> None:
    assert call_name(replace(call(), **changes)) == name


def test_missing_ranks_are_listed_for_each_group_the_longest_silent_first() -> None:
    found = two_groups(
        Heartbeat(rank=1, host="a", age_seconds=2.0, issued={OTHER: 4}),
        peer(2, 1233, age_seconds=4.0),
        peer(3, 0, age_seconds=9.0),
    )

    assert missing_ranks(found) == [
        MissingRanks(ranks=(1,), call=OTHER_CALL),
        MissingRanks(ranks=(3, 2), call=CALL),
    ]
    assert awaited_rank(found) == 3


def test_a_rank_that_has_not_used_a_group_is_missing_at_its_first_call() -> None:
    new = Heartbeat(rank=1, host="a", age_seconds=1.0, issued={})
    found = evidence([call(1)], [new], issued=1)

    assert [each.ranks for each in missing_ranks(found)] == [(1,)]


def test_nobody_is_missing_where_all_have_arrived_or_nothing_is_known() -> None:
    arrived = evidence([call()], [peer(1, 1234), peer(2, 1235)])
    unknown = evidence([call()], None)
    of_no_group = replace(arrived, rank_sets={})

    for found in (arrived, unknown, of_no_group):
        assert missing_ranks(found) == []
        assert awaited_rank(found) is None


def test_ranks_that_wait_for_this_one_are_in_the_call_that_it_issues_next() -> None:
    found = two_groups(
        peer(3, 1235),
        peer(2, 1236),
        Heartbeat(rank=1, host="a", age_seconds=1.0, issued={OTHER: 5, KEY: 9999}),
    )

    assert waiting_ranks(found) == [
        MissingRanks(ranks=(2, 3), call="collective number 1235 of group dp")
    ]
    assert waiting_ranks(evidence([call()], None)) == []


UNSEEN = "an unrecorded collective of group dp (such as one of DDP)"


@pytest.mark.parametrize(
    ("own", "others", "missing", "waiting"),
    [
        (1, {1: (77, 1)}, (), ()),  # all have arrived
        (0, {1: (77, 0)}, (), ()),
        (2, {1: (77, 1), 2: (77, 2), 3: (77, 3)}, (1,), (3,)),
        (1, {1: (76, 5)}, (1,), ()),  # it is still in the step before
        (0, {1: (78, 1)}, (), (1,)),
        (0, {1: (78, 0)}, (), ()),  # ahead, but in no such call
        (0, {1: (76, 0)}, (), ()),
        (1, {1: None}, (), ()),  # it is monitored by another process
    ],
)
def test_ranks_are_compared_by_calls_that_no_wrapper_sees(
    own: int,
    others: dict[int, tuple[int, int] | None],
    missing: tuple[int, ...],
    waiting: tuple[int, ...],
) -> None:
    peers = [
        replace(peer(rank, 0), step=each[0], unseen={KEY: each[1]}) if each else peer(rank, 0)
        for rank, each in others.items()
    ]
    found = evidence([call(7, in_flight=False)], peers, issued=0)
    found = replace(found, rank_sets={KEY: replace(found.rank_sets[KEY], unseen=own)})

    assert missing_ranks(found) == [MissingRanks(ranks=missing, call=UNSEEN)] * bool(missing)
    assert waiting_ranks(found) == [MissingRanks(ranks=waiting, call=UNSEEN)] * bool(waiting)
    assert awaited_rank(found) == (missing[0] if missing else None)


def test_calls_that_no_wrapper_sees_do_not_matter_while_a_recorded_one_is_in_flight() -> None:
    late = replace(peer(1, 1234), step=77, unseen={KEY: 0})
    found = evidence([call()], [late])
    found = replace(found, rank_sets={KEY: replace(found.rank_sets[KEY], unseen=1)})

    assert missing_ranks(found) == []


def test_only_calls_that_have_not_ended_are_in_flight() -> None:
    calls = [call(3), call(4, in_flight=False), call(5)]

    assert calls_in_flight(evidence(calls, None)) == [calls[0], calls[2]]


def test_of_ranks_silent_for_equally_long_the_lowest_comes_first() -> None:
    ages = {4: 2.0, 2: 2.0, 1: None, 7: 11.0}
    peers = {rank: peer(rank, 0, age_seconds=age) for rank, age in ages.items()}

    assert sort_by_silence(peers, peers) == [7, 2, 4, 1]


def test_a_rank_whose_heartbeat_is_not_due_is_not_silent() -> None:
    beats = [peer(1, 0, age_seconds=1.0), peer(2, 0, age_seconds=9.0), peer(3, 0, age_seconds=11.0)]
    peers = {beat.rank: replace(beat, interval_seconds=10.0) for beat in beats}

    assert sort_by_silence(peers, peers) == [3, 1, 2]
