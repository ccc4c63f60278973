"""Numbered values that come in pieces: joined, overlapping, and with gaps."""

from __future__ import annotations

import numpy as np

from zerowatch.runtime.cross_rank.report_merger import MAX_PENDING_VALUES, NumberedRange


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
