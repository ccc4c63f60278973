"""Turns totals since the start into increases since the last export (delta temporality)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..recorder import Distribution
from .telemetry_data import AttributeValue, Family, Point

_SeriesKey = tuple[str, frozenset[tuple[str, AttributeValue]]]


class Increases:
    """The totals that the receiver has accepted, from which increases are computed.

    An increase that was not accepted is part of the next one. Gauges are not changed.
    """

    def __init__(self) -> None:
        self._accepted: dict[_SeriesKey, float | Distribution] = {}

    def since_accepted(self, families: Iterable[Family]) -> list[Family]:
        """Return the families with increases instead of totals."""
        return [
            replace(family, points=[self._increase(family, point) for point in family.points])
            if _is_counted(family)
            else family
            for family in families
        ]

    def accept(self, families: Iterable[Family]) -> None:
        """Remember the totals of an export that the receiver has accepted."""
        for family in families:
            if _is_counted(family):
                for point in family.points:
                    self._accepted[_key(family, point)] = point.value

    def _increase(self, family: Family, point: Point) -> Point:
        before = self._accepted.get(_key(family, point))
        if isinstance(point.value, Distribution):
            if isinstance(before, Distribution) and before.count <= point.value.count:
                return replace(point, value=_difference(point.value, before))
        elif isinstance(before, float | int) and before <= point.value:
            return replace(point, value=point.value - before)
        return point  # the first export, or a counter that started over


def _is_counted(family: Family) -> bool:
    return family.kind in ("counter", "histogram")


def _key(family: Family, point: Point) -> _SeriesKey:
    return family.name, frozenset(point.attributes.items())


def _difference(now: Distribution, before: Distribution) -> Distribution:
    counts = tuple(new - old for new, old in zip(now.counts, before.counts, strict=True))
    return Distribution(
        counts=counts,
        sum=now.sum - before.sum,
        # An exemplar of an earlier export is in a bucket that may have no observation since.
        exemplars=tuple(
            found if count else None for found, count in zip(now.exemplars, counts, strict=True)
        ),
        exponential=_difference_of_counts(now.exponential, before.exponential),
    )


def _difference_of_counts(
    now: Mapping[int, int] | None, before: Mapping[int, int] | None
) -> Mapping[int, int] | None:
    if now is None:
        return None
    increases = {index: count - (before or {}).get(index, 0) for index, count in now.items()}
    return {index: count for index, count in increases.items() if count}
