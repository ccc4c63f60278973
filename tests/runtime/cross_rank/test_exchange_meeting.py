"""Reports of a group's members put together: who is ahead, silent, back again, or astray."""

from __future__ import annotations

import math

import numpy as np

from zerowatch.runtime.cross_rank import report_merger as meetings
from zerowatch.runtime.cross_rank.call_report import (
    NO_SECONDS,
    NO_SIGNATURES,
    CallReport,
    SequenceHash,
)
from zerowatch.runtime.cross_rank.numbered_range import MOST_VALUES
from zerowatch.runtime.cross_rank.report_merger import ReportMerger

NAN = math.nan
START = SequenceHash(since=1, crc=0)


def meeting_of(*ranks: int) -> ReportMerger:
    return ReportMerger({rank: (rank,) for rank in ranks})


def timed(first: int, *seconds: float) -> CallReport:
    return CallReport(
        first_timed=first,
        durations=np.array(seconds, np.float32),
        first_issued=1,
        signatures=NO_SIGNATURES,
        history=START,
    )


def issued(first: int, *signatures: int, history: SequenceHash | None = START) -> CallReport:
    return CallReport(
        first_timed=1,
        durations=NO_SECONDS,
        first_issued=first,
        signatures=np.array(signatures, np.uint32),
        history=history,
    )


def history_of(*signatures: int, since: int = 1) -> SequenceHash:
    return SequenceHash(since=since, crc=0).extended(np.array(signatures, np.uint32))


def test_the_least_duration_of_each_call_is_found() -> None:
    meeting = meeting_of(0, 1, 2)
    for rank, seconds in enumerate([(1.0, 5.0), (3.0, 0.5), (2.0, 4.0)]):
        meeting.add(rank, timed(1, *seconds), {})

    section = meeting.take()

    assert section is not None
    assert (section.first_timed, section.durations.tolist()) == (1, [1.0, 0.5])


def test_nothing_comes_of_it_until_all_have_reported() -> None:
    meeting = meeting_of(0, 1)
    meeting.add(0, timed(1, 1.0), {})

    assert meeting.take() is None


def test_what_was_taken_is_not_given_again() -> None:
    meeting = meeting_of(0, 1)
    for rank in (0, 1):
        meeting.add(rank, timed(1, 1.0), {})
    meeting.take()

    assert meeting.take() is None


def test_members_ahead_of_others_wait_for_them() -> None:
    meeting = meeting_of(0, 1)
    meeting.add(0, timed(1, 1.0, 2.0, 3.0), {})
    meeting.add(1, timed(1, 0.5), {})
    first = meeting.take()
    meeting.add(1, timed(2, 2.5, 2.5), {})
    second = meeting.take()

    assert first is not None and first.durations.tolist() == [0.5]
    assert second is not None
    assert (second.first_timed, second.durations.tolist()) == (2, [2.0, 2.5])


def test_a_call_that_one_member_could_not_time_is_compared_among_the_others() -> None:
    meeting = meeting_of(0, 1)
    meeting.add(0, timed(1, NAN, NAN), {})
    meeting.add(1, timed(1, 2.0, NAN), {})

    section = meeting.take()

    assert section is not None
    assert section.durations[0] == 2.0
    assert math.isnan(section.durations[1])


def test_a_member_that_is_left_out_is_not_waited_for_and_may_come_back() -> None:
    meeting = meeting_of(0, 1, 2)
    for rank in (0, 1, 2):
        meeting.add(rank, timed(1, 3.0), {})
    meeting.take()
    for rank in (0, 1):
        meeting.add(rank, timed(2, 2.0, 2.0), {})
    stuck = meeting.take()
    meeting.leave_out(2)
    without = meeting.take()
    meeting.add(2, timed(2, 1.0, 1.0, 1.0), {})
    for rank in (0, 1):
        meeting.add(rank, timed(4, 2.0), {})
    together = meeting.take()

    assert stuck is None
    assert without is not None and without.durations.tolist() == [2.0, 2.0]
    assert together is not None
    assert (together.first_timed, together.durations.tolist()) == (4, [1.0])


def test_calls_that_one_member_lost_are_left_out_for_all() -> None:
    meeting = meeting_of(0, 1)
    meeting.add(0, timed(1, 1.0, 1.0, 1.0, 1.0), {})
    meeting.add(1, timed(3, 0.5, 0.5), {})

    section = meeting.take()

    assert section is not None
    assert (section.first_timed, section.durations.tolist()) == (3, [0.5, 0.5])


def test_a_member_that_skipped_a_call_while_left_out_is_found_by_its_history() -> None:
    meeting = meeting_of(0, 1, 2)
    for rank in (0, 1, 2):
        meeting.add(rank, issued(1, 5, 6), {})
    meeting.take()
    meeting.leave_out(2)
    for rank in (0, 1):
        meeting.add(rank, issued(3, 7, 8), {})
    meeting.take()
    meeting.add(2, issued(3, 8, history=history_of(5, 6)), {})  # and not 7
    for rank in (0, 1):
        meeting.add(rank, issued(5, 9), {})
    meeting.add(2, issued(4, 7, 9), {})
    meeting.take()

    assert meeting.divergence is not None
    assert meeting.divergence.named == (2,)


def test_a_member_that_comes_back_having_done_the_same_has_not_diverged() -> None:
    meeting = meeting_of(0, 1, 2)
    for rank in (0, 1, 2):
        meeting.add(rank, issued(1, 5, 6), {})
    meeting.take()
    meeting.leave_out(2)
    for rank in (0, 1):
        meeting.add(rank, issued(3, 7, 8), {})
    meeting.take()
    meeting.add(2, issued(3, 7, history=history_of(5, 6)), {})
    for rank in (0, 1):
        meeting.add(rank, issued(5, 9), {})
    meeting.add(2, issued(4, 8, 9), {})
    section = meeting.take()

    assert meeting.divergence is None
    assert section is not None and section.first_issued == 5
    assert section.history == history_of(5, 6, 7, 8)


def test_after_a_gap_histories_that_agree_are_no_divergence() -> None:
    meeting = meeting_of(0, 1)
    for rank in (0, 1):
        meeting.add(rank, issued(1, 5), {})
    meeting.take()
    meeting.add(0, issued(2, 6, 7, 8), {})
    meeting.add(1, issued(4, 8, history=history_of(5, 6, 7)), {})  # a report of it was lost

    section = meeting.take()

    assert meeting.divergence is None
    assert section is not None
    assert (section.first_issued, section.signatures.tolist()) == (4, [8])


def test_after_a_gap_one_of_three_that_claims_another_history_is_named() -> None:
    meeting = meeting_of(0, 1, 2)
    meeting.add(0, issued(4, 8, history=history_of(1, 2, 3)), {})
    meeting.add(1, issued(4, 8, history=history_of(9, 9, 9)), {})
    meeting.add(2, issued(4, 8, history=history_of(1, 2, 3)), {})
    meeting.take()

    assert meeting.divergence is not None and meeting.divergence.named == (1,)


def test_of_two_that_claim_different_histories_both_are_named() -> None:
    meeting = meeting_of(0, 1)
    meeting.add(0, issued(4, 8, history=history_of(1, 2, 3)), {})
    meeting.add(1, issued(4, 8, history=history_of(9, 9, 9)), {})
    meeting.take()

    assert meeting.divergence is not None and meeting.divergence.named == (0, 1)


def test_members_watched_from_different_calls_on_are_not_taken_for_astray() -> None:
    meeting = meeting_of(0, 1)
    meeting.add(0, issued(1, 5, 6, 7), {})
    meeting.add(1, issued(3, 7, history=history_of(since=3)), {})
    first = meeting.take()
    meeting.leave_out(1)
    meeting.add(0, issued(4, 8), {})
    meeting.take()
    meeting.add(0, issued(5, 9), {})
    meeting.add(1, issued(5, 9, history=history_of(7, 8, since=3)), {})
    second = meeting.take()

    assert meeting.divergence is None
    assert first is not None and first.signatures.tolist() == [7]
    assert second is not None and second.signatures.tolist() == [9]


def test_a_member_that_lost_calls_claims_nothing() -> None:
    meeting = meeting_of(0, 1)
    meeting.add(0, issued(1, 5, 6), {})
    meeting.add(1, issued(2, 6, history=None), {})
    meeting.take()

    assert meeting.divergence is None


def test_a_block_that_differs_is_named_rank_by_rank() -> None:
    meeting = ReportMerger({0: (0, 1, 2), 3: (3, 4)})
    meeting.add(0, issued(1, 5), {5: "a", 6: "b"})
    meeting.add(3, issued(1, 6), {})
    meeting.take()

    assert meeting.divergence is not None
    assert meeting.divergence.named == (3, 4)
    assert meeting.divergence.issued == {0: "a", 1: "a", 2: "a", 3: "b", 4: "b"}


def test_merged_reports_give_the_same_as_all_at_once() -> None:
    chance = np.random.default_rng(0)
    rows = chance.random((6, 50)).astype(np.float32)
    blocks = [meeting_of(0, 1, 2), meeting_of(3, 4, 5)]
    top = ReportMerger({0: (0, 1, 2), 3: (3, 4, 5)})
    for rank, row in enumerate(rows):
        blocks[rank // 3].add(rank % 3 + 3 * (rank // 3), timed(1, *row.tolist()), {})
    for leader, block in zip((0, 3), blocks, strict=True):
        section = block.take()
        assert section is not None
        top.add(leader, section, {})

    merged = top.take()

    assert merged is not None
    assert np.array_equal(merged.durations, rows.min(axis=0))


def both(first: int, seconds: tuple[float, ...], signatures: tuple[int, ...]) -> CallReport:
    return CallReport(
        first_timed=first,
        durations=np.array(seconds, np.float32),
        first_issued=first,
        signatures=np.array(signatures, np.uint32),
        history=START,
    )


def test_from_the_divergence_on_no_durations_are_compared_as_numbers_are_shifted() -> None:
    meeting = meeting_of(0, 1)
    meeting.add(0, both(1, (1.0, 1.0, 1.0, 1.0), (5, 6, 7, 8)), {})
    meeting.add(1, both(1, (2.0, 2.0, 9.0, 2.0), (5, 6, 6, 7)), {})
    first = meeting.take()
    meeting.add(0, both(5, (1.0, 1.0), (5, 6)), {})
    meeting.add(1, both(5, (2.0, 2.0), (8, 5)), {})
    second = meeting.take()

    assert meeting.divergence is not None and meeting.divergence.sequence == 3
    assert first is not None and second is not None
    np.testing.assert_array_equal(first.durations, np.array([1.0, 1.0, NAN, NAN], np.float32))
    assert (second.first_timed, np.isnan(second.durations).tolist()) == (5, [True, True])


def test_a_member_astray_for_long_is_not_compared_in_the_calls_before_it_was_found_out() -> None:
    meeting = meeting_of(0, 1)
    for rank, before in ((0, (5, 6)), (1, (6, 7))):
        section = CallReport(
            first_timed=2,
            durations=np.array([1.0, 1.0], np.float32),
            first_issued=3,
            signatures=np.array([8], np.uint32),
            history=history_of(*before),
        )
        meeting.add(rank, section, {})

    section = meeting.take()

    assert meeting.divergence is not None and meeting.divergence.sequence == 3
    assert section is not None and section.first_timed == 3
    assert np.isnan(section.durations).tolist() == [True]


def test_after_a_divergence_nothing_piles_up() -> None:
    meeting = meeting_of(0, 1)
    for rank in (0, 1):
        meeting.add(rank, issued(1, rank), {0: "a", 1: "b"})
    meeting.take()
    for number in range(2, 12):
        for rank in (0, 1):
            meeting.add(rank, both(number, (1.0 + rank,), (number,)), {number: "another"})
        meeting.take()

    for member in meeting._members.values():
        assert (len(member.issued.values), len(member.timed.values)) == (0, 0)
    assert 11 not in meeting.names


def test_a_member_that_no_longer_gets_on_does_not_let_the_others_pile_up() -> None:
    meeting = meeting_of(0, 1)
    meeting.add(1, timed(1, 1.0), {})
    part = np.ones(MOST_VALUES // 2, np.float32)
    for number in range(5):
        section = timed(1 + number * len(part), *())
        meeting.add(
            0,
            CallReport(
                first_timed=section.first_timed,
                durations=part,
                first_issued=1,
                signatures=NO_SIGNATURES,
                history=None,
            ),
            {},
        )

    assert len(meeting._members[0].timed.values) == MOST_VALUES


def test_a_member_whose_oldest_calls_were_too_many_to_keep_is_not_taken_for_astray() -> None:
    meeting = meeting_of(0, 1)
    part = tuple(range(MOST_VALUES // 2))
    for number in range(3):
        meeting.add(0, issued(1 + number * len(part), *part), {})
    for number in range(3):
        meeting.add(1, issued(1 + number * len(part), *part), {})
        meeting.take()

    assert meeting.divergence is None
    assert meeting._members[0].issued.end == 1 + 3 * len(part)


def test_names_of_ever_new_signatures_are_forgotten_but_not_those_yet_to_be_compared(
    monkeypatch,
) -> None:
    monkeypatch.setattr(meetings, "MOST_NAMES", 10)
    meeting = meeting_of(0, 1)
    for number in range(1, 40):
        for rank in (0, 1):
            meeting.add(rank, issued(number, number), {number: f"call {number}"})
        meeting.take()
    assert len(meeting.names) <= 11

    meeting.add(0, issued(40, 40, 41), {40: "call 40", 41: "call 41"})
    meeting.add(1, issued(40, 40, 42), {n: f"call {n}" for n in range(42, 60)})
    meeting.take()

    assert meeting.divergence is not None
    assert meeting.divergence.issued == {0: "call 41", 1: "call 42"}
