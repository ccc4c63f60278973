"""Tests of `diverged_ranks`: which members left the common sequence of collectives."""

from __future__ import annotations

import numpy as np
import pytest

from zerowatch.runtime.cross_rank.divergence import (
    MAX_CONTEXT,
    Divergence,
    context_match_length,
    diverged_ranks,
    parse_divergence,
)
from zerowatch.runtime.cross_rank.exchange.rank_messages import (
    NO_DURATIONS,
    CallReport,
    SequenceHash,
)
from zerowatch.runtime.cross_rank.exchange.report_merger import ReportMerger

# A step as ZeRO issues it: alike calls in a row, and some that stand alone.
STEP = [1, 1, 2, 1, 3, 4, 4, 5]
STEPS_BEFORE = 4
NAMES = {number: f"call {number}" for number in range(10)}


def divergence_of(*rows: list[int]) -> Divergence | None:
    """Merge what each member issued, after some steps on which they agreed."""
    merger = ReportMerger({rank: (rank,) for rank in range(len(rows))})
    for rank, row in enumerate(rows):
        report = CallReport(
            first_timed=1,
            durations=NO_DURATIONS,
            first_issued=1,
            signatures=np.array(STEP * STEPS_BEFORE + row, np.uint32),
            prefix_hash=SequenceHash(since=1, crc=0),
        )
        merger.add(rank, report, NAMES)
    merger.drain()
    return merger.divergence


def skipping(at: int) -> list[int]:
    row = STEP * 2
    return row[:at] + row[at + 1 :]


def inserting(at: int, call: int) -> list[int]:
    return [*STEP[:at], call, *STEP[at:], *STEP]


def swapping(at: int) -> list[int]:
    row = STEP * 2
    row[at], row[at + 1] = row[at + 1], row[at]
    return row


def first_difference(row: list[int]) -> int:
    pairs = zip(row, STEP * 2, strict=False)
    return next(at for at, (one, other) in enumerate(pairs) if one != other)


WRONG_ROWS = [
    *((f"skips call {at}", skipping(at)) for at in range(len(STEP))),
    *((f"inserts before {at}", inserting(at, 9)) for at in range(len(STEP))),
    *((f"repeats {at}", inserting(at, STEP[at])) for at in range(len(STEP))),
    *((f"swaps {at}", swapping(at)) for at in range(len(STEP)) if STEP[at] != (STEP * 2)[at + 1]),
]


@pytest.mark.parametrize("num_right", [1, 2])
@pytest.mark.parametrize(
    "wrong", [row for _, row in WRONG_ROWS], ids=[name for name, _ in WRONG_ROWS]
)
def test_the_member_that_diverged_is_named(wrong: list[int], num_right: int) -> None:
    divergence = divergence_of(wrong, *[STEP * 2] * num_right)

    assert divergence is not None
    assert divergence.diverged == (0,)
    assert divergence.sequence == STEPS_BEFORE * len(STEP) + first_difference(wrong) + 1


def test_members_that_agree_do_not_diverge() -> None:
    assert divergence_of(STEP, STEP, STEP) is None


def test_a_member_that_is_ahead_does_not_diverge() -> None:
    assert divergence_of(STEP, STEP + STEP[:3]) is None


def test_of_two_new_calls_both_members_are_named() -> None:
    divergence = divergence_of([*STEP, 8], [*STEP, 9])

    assert divergence is not None and divergence.diverged == (0, 1)


def test_the_majority_is_right_even_against_the_history() -> None:
    assert diverged_ranks({0: 1, 1: 7, 2: 7}, STEP * 3) == (0,)


def test_without_a_history_of_two_members_both_are_named() -> None:
    assert diverged_ranks({0: 1, 1: 2}, []) == (0, 1)


def test_the_match_length_is_that_of_the_longest_run_that_occurred_before() -> None:
    before = [1, 2, 3, 9, 2, 3, 1, 2]

    assert context_match_length(before, 3) == 3  # 1, 2, 3; after 9 only 2, 3
    assert context_match_length(before, 9) == 1
    assert context_match_length(before, 7) == 0
    assert context_match_length([5] * 200, 5) == MAX_CONTEXT + 1


def test_three_that_all_differ_are_compared_with_the_history() -> None:
    assert diverged_ranks({0: 8, 1: 1, 2: 9}, STEP * 3) == (0, 2)


def test_the_message_names_the_diverged_rank_and_what_the_others_issued() -> None:
    message = Divergence(sequence=7, issued={0: "a", 1: "b", 2: "a"}, diverged=(1,)).message("dp")

    assert message == (
        "rank 1 diverged from the common sequence of collectives at call 7 of group dp: issued b, "
        "where the others issued a"
    )


def test_a_message_without_a_diverged_rank_lists_what_each_issued() -> None:
    message = Divergence(sequence=7, issued={0: "a", 3: "b"}, diverged=(0, 3)).message("tp")

    assert message == (
        "the ranks issue different collectives from call 7 of group tp on: rank 0 a; rank 3 b"
    )


def test_several_diverged_ranks_are_named_together() -> None:
    divergence = Divergence(
        sequence=1, issued={0: "a", 1: "b", 2: "c", 3: "a", 4: "a"}, diverged=(1, 2)
    )

    assert divergence.message("dp").startswith("ranks 1, 2 diverged")
    assert "issued b or c, where the others issued a" in divergence.message("dp")


def test_half_of_the_members_are_no_majority() -> None:
    values = {0: 9, 1: 9, 2: 1, 3: 1}

    assert diverged_ranks(values, STEP * 3) == (0, 1)
    assert diverged_ranks({rank: 9 - value for rank, value in values.items()}, []) == (0, 1, 2, 3)


def test_of_runs_of_the_same_length_the_members_are_all_named() -> None:
    assert diverged_ranks({3: 1, 5: 2}, [7, 1, 7, 2, 7]) == (3, 5)
    assert diverged_ranks({3: 1, 5: 2}, [7, 1, 7, 2, 8, 7, 1, 8, 7]) == (5,)


def test_at_most_64_calls_before_a_call_are_compared() -> None:
    before = list(range(100))

    assert context_match_length([*before, 7, *before], 7) == 65
    assert context_match_length([*before[-63:], 7, *before[-63:]], 7) == 64


def test_a_divergence_is_parsed_with_numbers_as_ranks() -> None:
    fields = {"sequence": 5, "issued": {"0": "barrier", "17": "reduce"}, "diverged": [17]}

    assert parse_divergence(fields) == Divergence(
        sequence=5, issued={0: "barrier", 17: "reduce"}, diverged=(17,)
    )
