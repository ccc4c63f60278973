"""Tests of `ReportMerger`: members ahead, silent, back again or diverged; and of its ranges."""

from __future__ import annotations

import math

import numpy as np

from zerowatch.runtime.cross_rank.exchange import report_merger as report_merger
from zerowatch.runtime.cross_rank.exchange.rank_messages import (
    INEXACT,
    NO_DURATIONS,
    NO_SIGNATURES,
    CallReport,
    SequenceHash,
)
from zerowatch.runtime.cross_rank.exchange.report_merger import (
    MAX_PENDING_VALUES,
    NumberedRange,
    ReportMerger,
)

NAN = math.nan
START = SequenceHash(since=1, crc=0)


def merger_of(*ranks: int) -> ReportMerger:
    return ReportMerger({rank: (rank,) for rank in ranks})


def timed(first: int, *seconds: float) -> CallReport:
    return CallReport(
        first_timed=first,
        durations=np.array(seconds, np.float32),
        first_issued=1,
        signatures=NO_SIGNATURES,
        prefix_hash=START,
    )


def issued(first: int, *signatures: int, prefix_hash: SequenceHash | None = START) -> CallReport:
    return CallReport(
        first_timed=1,
        durations=NO_DURATIONS,
        first_issued=first,
        signatures=np.array(signatures, np.uint32),
        prefix_hash=prefix_hash,
    )


def hash_of(*signatures: int, since: int = 1) -> SequenceHash:
    return SequenceHash(since=since, crc=0).extended(np.array(signatures, np.uint32))


def test_a_bound_on_one_rank_makes_the_least_duration_inexact() -> None:
    merger = merger_of(0, 1, 2)
    for rank, seconds in enumerate([(1.0, NAN), (INEXACT, INEXACT), (NAN, 4.0)]):
        merger.add(rank, timed(1, *seconds), {})

    report = merger.drain()

    assert report is not None
    assert report.durations.tolist() == [INEXACT, INEXACT]


def test_the_least_duration_of_each_call_is_found() -> None:
    merger = merger_of(0, 1, 2)
    for rank, seconds in enumerate([(1.0, 5.0), (3.0, 0.5), (2.0, 4.0)]):
        merger.add(rank, timed(1, *seconds), {})

    report = merger.drain()

    assert report is not None
    assert (report.first_timed, report.durations.tolist()) == (1, [1.0, 0.5])


def test_there_is_no_result_until_all_have_reported() -> None:
    merger = merger_of(0, 1)
    merger.add(0, timed(1, 1.0), {})

    assert merger.drain() is None


def test_a_result_is_returned_once() -> None:
    merger = merger_of(0, 1)
    for rank in (0, 1):
        merger.add(rank, timed(1, 1.0), {})
    merger.drain()

    assert merger.drain() is None


def test_members_ahead_of_others_wait_for_them() -> None:
    merger = merger_of(0, 1)
    merger.add(0, timed(1, 1.0, 2.0, 3.0), {})
    merger.add(1, timed(1, 0.5), {})
    first = merger.drain()
    merger.add(1, timed(2, 2.5, 2.5), {})
    second = merger.drain()

    assert first is not None and first.durations.tolist() == [0.5]
    assert second is not None
    assert (second.first_timed, second.durations.tolist()) == (2, [2.0, 2.5])


def test_a_call_that_one_member_could_not_time_is_compared_among_the_others() -> None:
    merger = merger_of(0, 1)
    merger.add(0, timed(1, NAN, NAN), {})
    merger.add(1, timed(1, 2.0, NAN), {})

    report = merger.drain()

    assert report is not None
    assert report.durations[0] == 2.0
    assert math.isnan(report.durations[1])


def test_an_excluded_member_is_not_waited_for_and_may_come_back() -> None:
    merger = merger_of(0, 1, 2)
    for rank in (0, 1, 2):
        merger.add(rank, timed(1, 3.0), {})
    merger.drain()
    for rank in (0, 1):
        merger.add(rank, timed(2, 2.0, 2.0), {})
    stuck = merger.drain()
    merger.exclude(2)
    without = merger.drain()
    merger.add(2, timed(2, 1.0, 1.0, 1.0), {})
    for rank in (0, 1):
        merger.add(rank, timed(4, 2.0), {})
    together = merger.drain()

    assert stuck is None
    assert without is not None and without.durations.tolist() == [2.0, 2.0]
    assert together is not None
    assert (together.first_timed, together.durations.tolist()) == (4, [1.0])


def test_calls_that_one_member_lost_are_skipped_for_all() -> None:
    merger = merger_of(0, 1)
    merger.add(0, timed(1, 1.0, 1.0, 1.0, 1.0), {})
    merger.add(1, timed(3, 0.5, 0.5), {})

    report = merger.drain()

    assert report is not None
    assert (report.first_timed, report.durations.tolist()) == (3, [0.5, 0.5])


def test_a_member_that_skipped_a_call_while_excluded_is_found_by_its_hash() -> None:
    merger = merger_of(0, 1, 2)
    for rank in (0, 1, 2):
        merger.add(rank, issued(1, 5, 6), {})
    merger.drain()
    merger.exclude(2)
    for rank in (0, 1):
        merger.add(rank, issued(3, 7, 8), {})
    merger.drain()
    merger.add(2, issued(3, 8, prefix_hash=hash_of(5, 6)), {})  # and not 7
    for rank in (0, 1):
        merger.add(rank, issued(5, 9), {})
    merger.add(2, issued(4, 7, 9), {})
    merger.drain()

    assert merger.divergence is not None
    assert merger.divergence.diverged == (2,)


def test_a_member_that_comes_back_with_the_same_calls_has_not_diverged() -> None:
    merger = merger_of(0, 1, 2)
    for rank in (0, 1, 2):
        merger.add(rank, issued(1, 5, 6), {})
    merger.drain()
    merger.exclude(2)
    for rank in (0, 1):
        merger.add(rank, issued(3, 7, 8), {})
    merger.drain()
    merger.add(2, issued(3, 7, prefix_hash=hash_of(5, 6)), {})
    for rank in (0, 1):
        merger.add(rank, issued(5, 9), {})
    merger.add(2, issued(4, 8, 9), {})
    report = merger.drain()

    assert merger.divergence is None
    assert report is not None and report.first_issued == 5
    assert report.prefix_hash == hash_of(5, 6, 7, 8)


def test_after_a_gap_equal_hashes_are_no_divergence() -> None:
    merger = merger_of(0, 1)
    for rank in (0, 1):
        merger.add(rank, issued(1, 5), {})
    merger.drain()
    merger.add(0, issued(2, 6, 7, 8), {})
    merger.add(1, issued(4, 8, prefix_hash=hash_of(5, 6, 7)), {})  # a report of it was lost

    report = merger.drain()

    assert merger.divergence is None
    assert report is not None
    assert (report.first_issued, report.signatures.tolist()) == (4, [8])


def test_after_a_gap_one_of_three_with_another_hash_is_named() -> None:
    merger = merger_of(0, 1, 2)
    merger.add(0, issued(4, 8, prefix_hash=hash_of(1, 2, 3)), {})
    merger.add(1, issued(4, 8, prefix_hash=hash_of(9, 9, 9)), {})
    merger.add(2, issued(4, 8, prefix_hash=hash_of(1, 2, 3)), {})
    merger.drain()

    assert merger.divergence is not None and merger.divergence.diverged == (1,)


def test_of_two_with_different_hashes_both_are_named() -> None:
    merger = merger_of(0, 1)
    merger.add(0, issued(4, 8, prefix_hash=hash_of(1, 2, 3)), {})
    merger.add(1, issued(4, 8, prefix_hash=hash_of(9, 9, 9)), {})
    merger.drain()

    assert merger.divergence is not None and merger.divergence.diverged == (0, 1)


def test_members_monitored_from_different_calls_on_have_not_diverged() -> None:
    merger = merger_of(0, 1)
    merger.add(0, issued(1, 5, 6, 7), {})
    merger.add(1, issued(3, 7, prefix_hash=hash_of(since=3)), {})
    first = merger.drain()
    merger.exclude(1)
    merger.add(0, issued(4, 8), {})
    merger.drain()
    merger.add(0, issued(5, 9), {})
    merger.add(1, issued(5, 9, prefix_hash=hash_of(7, 8, since=3)), {})
    second = merger.drain()

    assert merger.divergence is None
    assert first is not None and first.signatures.tolist() == [7]
    assert second is not None and second.signatures.tolist() == [9]


def test_a_member_that_lost_calls_has_no_hash() -> None:
    merger = merger_of(0, 1)
    merger.add(0, issued(1, 5, 6), {})
    merger.add(1, issued(2, 6, prefix_hash=None), {})
    merger.drain()

    assert merger.divergence is None


def test_a_block_that_differs_is_named_rank_by_rank() -> None:
    merger = ReportMerger({0: (0, 1, 2), 3: (3, 4)})
    merger.add(0, issued(1, 5), {5: "a", 6: "b"})
    merger.add(3, issued(1, 6), {})
    merger.drain()

    assert merger.divergence is not None
    assert merger.divergence.diverged == (3, 4)
    assert merger.divergence.issued == {0: "a", 1: "a", 2: "a", 3: "b", 4: "b"}


def test_merged_blocks_give_the_same_as_all_at_once(seed: int) -> None:
    chance = np.random.default_rng(seed)
    rows = chance.random((6, 50)).astype(np.float32)
    blocks = [merger_of(0, 1, 2), merger_of(3, 4, 5)]
    top = ReportMerger({0: (0, 1, 2), 3: (3, 4, 5)})
    for rank, row in enumerate(rows):
        blocks[rank // 3].add(rank % 3 + 3 * (rank // 3), timed(1, *row.tolist()), {})
    for first_rank, block in zip((0, 3), blocks, strict=True):
        report = block.drain()
        assert report is not None
        top.add(first_rank, report, {})

    merged = top.drain()

    assert merged is not None
    assert np.array_equal(merged.durations, rows.min(axis=0))


def report_of(issued_calls: range, timed_calls: range) -> CallReport:
    """A report of calls whose signatures are their numbers."""
    return CallReport(
        first_timed=timed_calls.start,
        durations=np.ones(len(timed_calls), np.float32),
        first_issued=issued_calls.start,
        signatures=np.array(issued_calls, np.uint32),
        prefix_hash=hash_of(*range(1, issued_calls.start)),
    )


def test_after_a_gap_a_report_without_common_calls_has_the_hash_of_the_calls_before_it() -> None:
    merger = merger_of(0, 1)
    for rank in (0, 1):
        merger.add(rank, report_of(range(1, 5), range(1, 3)), {})
    merger.drain()
    merger.add(0, report_of(range(7, 9), range(3, 7)), {})  # a report of it was lost
    merger.add(1, report_of(range(5, 7), range(3, 7)), {})

    report = merger.drain()

    assert report is not None
    assert (report.durations.tolist(), report.signatures.tolist()) == ([1.0] * 4, [])
    assert report.prefix_hash == hash_of(*range(1, report.first_issued))


def test_blocks_that_lost_reports_of_the_same_calls_have_not_diverged() -> None:
    blocks = {0: merger_of(0, 1), 2: merger_of(2, 3)}
    top = ReportMerger({0: (0, 1), 2: (2, 3)})
    merged = None
    exchanges = [
        dict.fromkeys(range(4), report_of(range(1, 5), range(1, 3))),
        {  # the reports of calls 5 and 6 were lost, except that of rank 1
            0: report_of(range(7, 9), range(3, 7)),
            1: report_of(range(5, 7), range(3, 7)),
            2: report_of(range(7, 9), range(3, 7)),
            3: report_of(range(7, 9), range(3, 7)),
        },
        {
            0: report_of(range(9, 11), range(7, 9)),
            1: report_of(range(7, 11), range(7, 9)),
            2: report_of(range(9, 11), range(7, 9)),
            3: report_of(range(9, 11), range(7, 9)),
        },
    ]

    for reports in exchanges:
        for rank, report in reports.items():
            blocks[rank // 2 * 2].add(rank, report, {})
        for first_rank, block in blocks.items():
            of_block = block.drain()
            assert of_block is not None
            top.add(first_rank, of_block, {})
        merged = top.drain()

    assert top.divergence is None
    assert merged is not None
    assert (merged.first_issued, merged.signatures.tolist()) == (7, [7, 8, 9, 10])
    assert merged.prefix_hash == hash_of(*range(1, 7))


def both(first: int, seconds: tuple[float, ...], signatures: tuple[int, ...]) -> CallReport:
    return CallReport(
        first_timed=first,
        durations=np.array(seconds, np.float32),
        first_issued=first,
        signatures=np.array(signatures, np.uint32),
        prefix_hash=START,
    )


def test_from_the_divergence_on_no_durations_are_compared_as_numbers_are_shifted() -> None:
    merger = merger_of(0, 1)
    merger.add(0, both(1, (1.0, 1.0, 1.0, 1.0), (5, 6, 7, 8)), {})
    merger.add(1, both(1, (2.0, 2.0, 9.0, 2.0), (5, 6, 6, 7)), {})
    first = merger.drain()
    merger.add(0, both(5, (1.0, 1.0), (5, 6)), {})
    merger.add(1, both(5, (2.0, 2.0), (8, 5)), {})
    second = merger.drain()

    assert merger.divergence is not None and merger.divergence.sequence == 3
    assert first is not None and second is not None
    np.testing.assert_array_equal(first.durations, np.array([1.0, 1.0, NAN, NAN], np.float32))
    assert (second.first_timed, np.isnan(second.durations).tolist()) == (5, [True, True])


def test_calls_before_a_late_detected_divergence_are_not_compared() -> None:
    merger = merger_of(0, 1)
    for rank, before in ((0, (5, 6)), (1, (6, 7))):
        report = CallReport(
            first_timed=2,
            durations=np.array([1.0, 1.0], np.float32),
            first_issued=3,
            signatures=np.array([8], np.uint32),
            prefix_hash=hash_of(*before),
        )
        merger.add(rank, report, {})

    report = merger.drain()

    assert merger.divergence is not None and merger.divergence.sequence == 3
    assert report is not None and report.first_timed == 3
    assert np.isnan(report.durations).tolist() == [True]


def test_after_a_divergence_nothing_accumulates() -> None:
    merger = merger_of(0, 1)
    for rank in (0, 1):
        merger.add(rank, issued(1, rank), {0: "a", 1: "b"})
    merger.drain()
    for number in range(2, 12):
        for rank in (0, 1):
            merger.add(rank, both(number, (1.0 + rank,), (number,)), {number: "another"})
        merger.drain()

    for member in merger._members.values():
        assert (len(member.issued.values), len(member.timed.values)) == (0, 0)
    assert 11 not in merger.names


def test_a_stuck_member_does_not_make_the_others_accumulate() -> None:
    merger = merger_of(0, 1)
    merger.add(1, timed(1, 1.0), {})
    part = np.ones(MAX_PENDING_VALUES // 2, np.float32)
    for number in range(5):
        report = timed(1 + number * len(part), *())
        merger.add(
            0,
            CallReport(
                first_timed=report.first_timed,
                durations=part,
                first_issued=1,
                signatures=NO_SIGNATURES,
                prefix_hash=None,
            ),
            {},
        )

    assert len(merger._members[0].timed.values) == MAX_PENDING_VALUES


def test_a_member_whose_oldest_calls_were_discarded_has_not_diverged() -> None:
    merger = merger_of(0, 1)
    part = tuple(range(MAX_PENDING_VALUES // 2))
    for number in range(3):
        merger.add(0, issued(1 + number * len(part), *part), {})
    for number in range(3):
        merger.add(1, issued(1 + number * len(part), *part), {})
        merger.drain()

    assert merger.divergence is None
    assert merger._members[0].issued.end == 1 + 3 * len(part)


def test_used_names_are_discarded_but_not_those_yet_to_be_compared(
    monkeypatch,
) -> None:
    monkeypatch.setattr(report_merger, "MAX_NAMES", 10)
    merger = merger_of(0, 1)
    for number in range(1, 40):
        for rank in (0, 1):
            merger.add(rank, issued(number, number), {number: f"call {number}"})
        merger.drain()
    assert len(merger.names) <= 11

    merger.add(0, issued(40, 40, 41), {40: "call 40", 41: "call 41"})
    merger.add(1, issued(40, 40, 42), {n: f"call {n}" for n in range(42, 60)})
    merger.drain()

    assert merger.divergence is not None
    assert merger.divergence.issued == {0: "call 41", 1: "call 42"}


def piece(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def test_pieces_join() -> None:
    values = NumberedRange(3, piece(3, 4))

    joined = values.add(5, piece(5, 6, 7))

    assert joined
    assert (values.first, values.end) == (3, 8)
    assert values.between(4, 7).tolist() == [4, 5, 6]


def test_an_empty_piece_changes_nothing() -> None:
    values = NumberedRange(3, piece(3, 4))

    assert values.add(5, piece())
    assert values.between(3, 5).tolist() == [3, 4]


def test_an_overlap_is_ignored() -> None:
    values = NumberedRange(3, piece(3, 4))

    joined = values.add(4, piece(99, 5))

    assert joined
    assert values.between(3, 6).tolist() == [3, 4, 5]


def test_a_piece_that_is_old_as_a_whole_is_ignored() -> None:
    values = NumberedRange(10, piece(10))

    assert values.add(1, piece(1, 2))
    assert (values.first, values.values.tolist()) == (10, [10])


def test_after_a_gap_only_what_follows_is_left() -> None:
    values = NumberedRange(3, piece(3, 4))

    joined = values.add(6, piece(6, 7))

    assert not joined
    assert (values.first, values.values.tolist()) == (6, [6, 7])


def test_used_values_are_discarded_once() -> None:
    values = NumberedRange(3, piece(3, 4, 5))

    values.discard(5)
    values.discard(4)

    assert (values.first, values.values.tolist()) == (5, [5])


def test_a_range_that_is_never_used_is_bounded() -> None:
    values = NumberedRange(0, piece())
    part = np.arange(MAX_PENDING_VALUES // 4, dtype=np.uint32)

    for number in range(6):
        values.add(number * len(part), part)

    assert len(values.values) == MAX_PENDING_VALUES
    assert values.end == 6 * len(part)
