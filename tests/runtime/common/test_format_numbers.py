"""Tests of the texts of sizes, counts, ratios and times in reports."""

from __future__ import annotations

import pytest

from zerowatch.runtime.common.format_numbers import (
    format_bytes,
    format_count,
    format_duration,
    format_ranks,
    format_ratio,
    format_seconds,
)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (999, "999 B"),
        (999.7, "0.976 KiB"),
        (1000, "0.977 KiB"),
        (1536, "1.5 KiB"),
        (-1536, "-1.5 KiB"),
        (3 * 2**20, "3 MiB"),
        (999 * 2**20, "999 MiB"),
        (1000 * 2**20, "0.98 GiB"),
        (5 * 2**30 // 4, "1.25 GiB"),
        (-5 * 2**30 // 4, "-1.25 GiB"),
        (10 * 2**30, "10.0 GiB"),
        (999 * 2**30, "999.0 GiB"),
        (1000 * 2**30, "0.98 TiB"),
        (12.25 * 2**40, "12.2 TiB"),
    ],
)
def test_a_size_has_its_binary_unit(num_bytes: float | None, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1K"),
        (1234, "1.23K"),
        (999_499, "999K"),
        (999_999, "1M"),
        (1_000_000, "1M"),
        (125_000_000, "125M"),
        (999_999_999, "1B"),
        (7_000_000_000, "7B"),
    ],
)
def test_a_count_has_three_digits(number: int, text: str) -> None:
    assert format_count(number) == text


@pytest.mark.parametrize(
    ("ratio", "text"), [(None, "-"), (0.0, "0%"), (0.126, "13%"), (-0.05, "-5%"), (1.5, "150%")]
)
def test_a_ratio_is_a_whole_percentage(ratio: float | None, text: str) -> None:
    assert format_ratio(ratio) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (2.5e-6, "2.5 µs"),
        (0.000999, "999 µs"),
        (0.001, "1 ms"),
        (0.4124, "412 ms"),
        (0.9999, "1 s"),
        (1.0, "1 s"),
        (12.345, "12.3 s"),
        (999.4, "999 s"),
        (999.7, "1,000 s"),
        (1000.0, "1,000 s"),
        (4321.4, "4,321 s"),
    ],
)
def test_a_short_time_has_three_digits(seconds: float | None, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.25 s"),
        (59.4, "59.4 s"),
        (59.6, "1 min 0 s"),
        (60, "1 min 0 s"),
        (185, "3 min 5 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 0 min"),
        (11_539, "3 h 12 min"),
        (90_000, "25 h 0 min"),
    ],
)
def test_a_long_time_has_two_units(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("num_ranks", "text"),
    [
        (1, "rank 0"),
        (2, "ranks 0, 1"),
        (8, "ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        (9, "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 1 more"),
    ],
)
def test_at_most_eight_ranks_are_named(num_ranks: int, text: str) -> None:
    assert format_ranks(range(num_ranks)) == text
