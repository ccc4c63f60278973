"""A read-only copy of all values at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .catalog.spec import MetricSpec

LabelValues = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemplar:
    """One observation that can be looked up elsewhere, such as in a trace."""

    labels: Mapping[str, str]
    value: float
    unix_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A histogram's counts: one per bucket of its spec, and one more above the last bound."""

    counts: tuple[int, ...]
    sum: float
    exemplars: tuple[Exemplar | None, ...]

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Values by metric and label values; a metric that was never set is absent."""

    values: Mapping[MetricSpec, Mapping[LabelValues, float]]
    distributions: Mapping[MetricSpec, Mapping[LabelValues, Distribution]]

    def value(self, spec: MetricSpec, *labels: str) -> float | None:
        """Return one series' value, or None if it was never set."""
        return self.values.get(spec, {}).get(labels)

    def total(self, spec: MetricSpec) -> float:
        """Return the sum over all series of a metric, 0 if there is none."""
        return sum(self.values.get(spec, {}).values())

    def distribution(self, spec: MetricSpec, *labels: str) -> Distribution | None:
        """Return one series' histogram, or None if nothing was observed."""
        return self.distributions.get(spec, {}).get(labels)
