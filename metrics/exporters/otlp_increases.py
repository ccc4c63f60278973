"""Turns totals since the start into increases since the last export (delta temporality)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ..recorder import Distribution
from .telemetry_data import AttributeValue, Family, Point

_SeriesKey = tuple[str, frozenset[tuple[str, AttributeValue]]]


class Increases:
    """The totals that the receiver has accepted, from which increases are computed.

    An increase that was not accepted is part of the next one, whose interval then begins earlier.
    Gauges are not changed.
    """

    def __init__(self) -> None:
        self._accepted: dict[_SeriesKey, tuple[float | Distribution, int]] = {}

    def since_accepted(self, families: Iterable[Family]) -> list[Family]:
        """Return the families with increases instead of totals."""
        return [
            replace(family, points=[self._increase(family, point) for point in family.points])
            if _is_counted(family)
            else family
            for family in families
        ]

    def accept(self, families: Iterable[Family], now_ns: int) -> None:
        """Remember the totals, read at `now_ns`, of an export that the receiver has accepted."""
        for family in families:
            if _is_counted(family):
                for point in family.points:
                    self._accepted[_key(family, point)] = point.value, now_ns

    def _increase(self, family: Family, point: Point) -> Point:
        accepted = self._accepted.get(_key(family, point))
        if accepted is None:
            return point
        before, start_ns = accepted
        return replace(point, value=_growth(point.value, before), start_ns=start_ns)


def _is_counted(family: Family) -> bool:
    return family.kind in ("counter", "histogram")


def _key(family: Family, point: Point) -> _SeriesKey:
    return family.name, frozenset(point.attributes.items())


def _growth(now: float | Distribution, before: float | Distribution) -> float | Distribution:
    if isinstance(now, Distribution):
        if isinstance(before, Distribution) and before.count <= now.count:
            return _difference(now, before)
    elif not isinstance(before, Distribution) and before <= now:
        return now - before
    return now  # it started over


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
