"""Numbers the series of snapshots, with the names, labels and values that /metrics serves.

A log of the metrics needs values by series, but no text. This takes a fraction of the time of
`exposition`, because names and labels are put together only when a series appears.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from ..catalog.spec import MetricSpec
from ..recorder import Distribution, LabelValues, Snapshot
from .prometheus import process_samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A metric: its name, with `_total` or `_info` if it has one, its kind, and its help text."""

    name: str
    kind: str
    help: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A series of one rank. The label `rank`, which all series of a rank share, is left out.

    Attributes:
        family: Index in `SeriesTable.families`.
        name: Name of the sample: of a histogram, the name of the metric with `_bucket`, `_count` or
            `_sum`.
        labels: The labels by name.
    """

    family: int
    name: str
    labels: dict[str, str]


class SeriesTable:
    """The families and series of one rank, in the order in which they appeared. Only appended to.

    Examples:
        >>> recorder.add(STEPS, 2)
        >>> table = SeriesTable(with_process=False)
        >>> table.values(snapshot)
        {0: 2.0, 1: 1795807642.1}
        >>> [each.name for each in table.series]
        [STEPS.name, "process_start_time_seconds"]

    Args:
        with_process: Whether to add all metrics of the process and of the garbage collector, as
            /metrics does with `serve.detail = "full"`, or the start time of the process only.
    """

    def __init__(self, *, with_process: bool) -> None:
        self.families: list[Family] = []
        self.series: list[Series] = []
        self._with_process = with_process
        self._family_indices: dict[str, int] = {}
        # The index of a series, or of the first of a histogram's series, by metric and labels.
        self._indices: dict[tuple[MetricSpec | str, LabelValues], int] = {}

    def values(
        self, snapshot: Snapshot, pause: Callable[[], None] = lambda: None
    ) -> dict[int, float]:
        """Return the value of each series of the snapshot, by its index in `series`.

        A series that is no longer in the snapshot has no value.

        Args:
            snapshot: The values of a recorder.
            pause: Called before each metric, so that a thread can divide this work.
        """
        found: dict[int, float] = {}
        for spec, by_labels in snapshot.values.items():
            pause()
            for labels, value in by_labels.items():
                index = self._indices.get((spec, labels))
                found[self._add_value(spec, labels) if index is None else index] = value
        for spec, distributions in snapshot.distributions.items():
            pause()
            for labels, seen in distributions.items():
                index = self._indices.get((spec, labels))
                first = self._add_histogram(spec, labels) if index is None else index
                found.update(enumerate(_parts(seen), start=first))
        found.update(self._process_values())
        return found

    def _process_values(self) -> dict[int, float]:
        found: dict[int, float] = {}
        for family, name, labels, value in process_samples(with_process=self._with_process):
            key = (name, tuple(labels.values()))
            if key not in self._indices:
                self._indices[key] = len(self.series)
                metric = name if family.type == "counter" else family.name
                index = self._family(metric, family.type, family.documentation)
                self.series.append(Series(family=index, name=name, labels=dict(labels)))
            found[self._indices[key]] = value
        return found

    def _add_value(self, spec: MetricSpec, labels: LabelValues) -> int:
        index = self._indices[spec, labels] = len(self.series)
        family = self._family(spec.name, spec.kind, spec.help)
        by_name = dict(zip(spec.label_names, labels, strict=True))
        self.series.append(Series(family=family, name=spec.name, labels=by_name))
        return index

    def _add_histogram(self, spec: MetricSpec, labels: LabelValues) -> int:
        """Add the series in the order of `_parts`: the buckets, the count and the sum."""
        index = self._indices[spec, labels] = len(self.series)
        family = self._family(spec.name, spec.kind, spec.help)
        by_name = dict(zip(spec.label_names, labels, strict=True))
        for bound in (*map(str, spec.buckets), "+Inf"):
            bucket = {**by_name, "le": bound}
            self.series.append(Series(family=family, name=f"{spec.name}_bucket", labels=bucket))
        for part in ("count", "sum"):
            self.series.append(Series(family=family, name=f"{spec.name}_{part}", labels=by_name))
        return index

    def _family(self, name: str, kind: str, help: str) -> int:
        if name not in self._family_indices:
            self._family_indices[name] = len(self.families)
            self.families.append(Family(name=name, kind=kind, help=help))
        return self._family_indices[name]


def _parts(seen: Distribution) -> list[float]:
    counts = list(accumulate(seen.counts))
    return [*counts, counts[-1], seen.sum]
