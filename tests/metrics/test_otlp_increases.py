"""Totals become increases since the last export that the receiver accepted."""

from __future__ import annotations

import pytest

from zerowatch.metrics.exporters.otlp_increases import Increases
from zerowatch.metrics.exporters.telemetry_data import Family, Point
from zerowatch.metrics.recorder import Distribution


def family(value, kind="counter", name="steps", **attributes):
    points = [Point(attributes=attributes or {"rank": "0"}, value=value)]
    return Family(name=name, kind=kind, unit="", help="", points=points)


def values(families):
    return [point.value for each in families for point in each.points]


def test_a_counter_is_sent_as_its_increase_since_the_accepted_export():
    increases = Increases()
    increases.accept([family(5.0)], 9)

    assert values(increases.since_accepted([family(12.0)])) == [7.0]


def test_the_first_export_has_the_total():
    assert values(Increases().since_accepted([family(5.0)])) == [5.0]


def test_an_increase_that_was_not_accepted_is_part_of_the_next():
    increases = Increases()
    increases.accept([family(5.0)], 9)

    increases.since_accepted([family(8.0)])

    assert values(increases.since_accepted([family(12.0)])) == [7.0]


@pytest.mark.parametrize(("now", "sent"), [(5.0, 0.0), (4.0, 4.0)])
def test_a_counter_that_stands_grows_by_nothing_and_one_that_started_over_by_its_total(now, sent):
    increases = Increases()
    increases.accept([family(5.0)], 9)

    assert values(increases.since_accepted([family(now)])) == [sent]


@pytest.mark.parametrize("kind", ["gauge", "updowncounter"])
def test_other_kinds_keep_their_value(kind):
    increases = Increases()
    increases.accept([family(5.0, kind)], 9)

    assert values(increases.since_accepted([family(12.0, kind)])) == [12.0]


@pytest.mark.parametrize("other", [family(12.0, name="samples"), family(12.0, rank="1")])
def test_series_of_another_name_or_with_other_attributes_are_apart(other):
    increases = Increases()
    increases.accept([family(5.0)], 9)

    assert values(increases.since_accepted([other])) == [12.0]


def histogram(counts, total, exemplars, exponential=None):
    seen = Distribution(counts=counts, sum=total, exemplars=exemplars, exponential=exponential)
    return family(seen, "histogram")


def test_a_histogram_is_sent_as_its_new_observations_and_their_exemplars():
    increases = Increases()
    increases.accept([histogram((2, 5, 1), 9.0, ("a", "b", "c"), {-1: 3, 2: 5})], 9)

    now = histogram((2, 9, 4), 20.0, ("a", "d", "e"), {-1: 3, 2: 7, 3: 5})

    assert values(increases.since_accepted([now])) == [
        Distribution(
            counts=(0, 4, 3), sum=11.0, exemplars=(None, "d", "e"), exponential={2: 2, 3: 5}
        )
    ]


def test_a_histogram_that_started_over_is_sent_whole():
    increases = Increases()
    increases.accept([histogram((2, 5, 1), 9.0, ("a", "b", "c"))], 9)

    now = histogram((1, 2, 0), 3.0, ("a", "b", None))

    assert values(increases.since_accepted([now])) == values([now])


def test_a_histogram_that_stands_has_no_observations():
    increases = Increases()
    increases.accept([histogram((2, 5), 9.0, ("a", "b"))], 9)

    (found,) = values(increases.since_accepted([histogram((2, 5), 9.0, ("a", "b"))]))

    assert (found.counts, found.sum, found.exemplars) == ((0, 0), 0.0, (None, None))
    assert found.exponential is None


def test_exponential_buckets_that_are_new_since_the_accepted_export_count_whole():
    increases = Increases()
    increases.accept([histogram((2,), 9.0, (None,))], 9)

    (found,) = values(increases.since_accepted([histogram((5,), 20.0, (None,), {1: 3})]))

    assert found.exponential == {1: 3}


def test_an_increase_begins_when_the_same_series_was_last_accepted():
    increases = Increases()
    increases.accept([family(5.0, name="steps"), family(5.0, name="samples")], 100)
    increases.accept([family(6.0, name="steps")], 200)

    now = [family(7.0, name=name) for name in ("steps", "samples", "tokens")]

    starts = [point.start_ns for each in increases.since_accepted(now) for point in each.points]
    assert starts == [200, 100, None]
