"""The ranges of rules in Prometheus' notation, as shipped and scaled for tests."""

from __future__ import annotations

import pytest

from zerowatch.dashboards.timing import HOUR, MINUTE, Timing


@pytest.mark.parametrize(
    ("seconds", "scale", "text"),
    [
        (0.25, 1, "250ms"),
        (1, 1, "1s"),
        (75, 1, "75s"),
        (MINUTE, 1, "1m"),
        (90 * MINUTE, 1, "90m"),
        (HOUR, 1, "1h"),
        (23 * HOUR, 1, "23h"),
        (48 * HOUR, 1, "2d"),
        (5 * MINUTE, 1 / 30, "10s"),
        (15, 0.1, "1500ms"),
    ],
)
def test_a_duration_has_the_largest_unit_that_divides_it(seconds, scale, text):
    assert Timing(scale=scale).duration(seconds) == text


@pytest.mark.parametrize(("scale", "text"), [(1, "300"), (0.5, "150"), (1 / 80, "3.75")])
def test_seconds_to_compare_with_are_a_plain_number(scale, text):
    assert Timing(scale=scale).seconds(300) == text


@pytest.mark.parametrize(
    ("scale", "ranges"),
    [
        (1, ("5m", "30m", "1h", "6h", "7d", "15s")),
        (1 / 10, ("30s", "3m", "6m", "36m", "1008m", "1500ms")),
        (1 / 30, ("10s", "1m", "2m", "12m", "336m", "1s")),
    ],
)
def test_ranges_scale_and_evaluations_are_at_least_a_second_apart(scale, ranges):
    timing = Timing(scale=scale)

    assert ranges == (
        timing.short,
        timing.long,
        timing.hour,
        timing.history,
        timing.week,
        timing.evaluation,
    )
