"""Holds the current value of every time series of this rank.

The monitoring threads write to one `Recorder`, which is safe to use from any thread. Exporters read
a `Snapshot`, a copy of all values at one moment. Writes inside `with recorder.commit():` become
visible together: a snapshot contains all of them or none.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from .catalog.spec import MetricSpec
from .exponential_buckets import ExponentialBuckets

LabelValues = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exemplar:
    """An observation with labels that identify it elsewhere, such as a trace id."""

    labels: Mapping[str, str]
    value: float
    unix_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """The state of a histogram: a count and an exemplar per bucket. The last bucket is +Inf.

    `exponential` has the same observations in exponential buckets, by index, if they are counted.
    """

    counts: tuple[int, ...]
    sum: float
    exemplars: tuple[Exemplar | None, ...]
    exponential: Mapping[int, int] | None = None

    @property
    def count(self) -> int:
        """The number of observations."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A read-only copy of all values, by metric and label values.

    A metric without a value is absent.
    """

    values: Mapping[MetricSpec, Mapping[LabelValues, float]]
    distributions: Mapping[MetricSpec, Mapping[LabelValues, Distribution]]

    def value(self, spec: MetricSpec, *labels: str) -> float | None:
        """Return the value of one series, or None if the series has no value."""
        return self.values.get(spec, {}).get(labels)

    def total(self, spec: MetricSpec) -> float:
        """Return the sum over all series of a metric, or 0 if the metric has no series."""
        return sum(self.values.get(spec, {}).values())

    def distribution(self, spec: MetricSpec, *labels: str) -> Distribution | None:
        """Return the histogram of one series, or None if nothing was observed."""
        return self.distributions.get(spec, {}).get(labels)

    def series(self) -> dict[str, float]:
        """Return all values by name and labels, as `/metrics` has them, without the label `rank`.

        Of a histogram there are the sum and the count.

        Examples:
            >>> snapshot.series()[PHASE_SECONDS.name + '{phase="forward"}']
            4.73
        """
        found = {
            _series_name(spec.name, spec, labels): value
            for spec, series in self.values.items()
            for labels, value in series.items()
        }
        for spec, distributions in self.distributions.items():
            for labels, seen in distributions.items():
                found[_series_name(f"{spec.name}_sum", spec, labels)] = seen.sum
                found[_series_name(f"{spec.name}_count", spec, labels)] = float(seen.count)
        return found

    def __repr__(self) -> str:
        """Return the number of the series. `series` returns their values."""
        return f"<Snapshot of {len(self.series())} series; series() returns them by name>"


def _series_name(name: str, spec: MetricSpec, labels: LabelValues) -> str:
    text = ",".join(
        f"{label}={json.dumps(value, ensure_ascii=False)}"
        for label, value in zip(spec.label_names, labels, strict=True)
    )
    return f"{name}{{{text}}}" if text else name


class _Histogram:
    """A histogram that accepts observations. `Distribution` is its read-only copy."""

    __slots__ = ("bounds", "counts", "exemplars", "exponential", "sum")

    def __init__(self, bounds: tuple[float, ...], *, is_exponential: bool) -> None:
        self.bounds = bounds
        self.exponential = ExponentialBuckets() if is_exponential else None
        self.counts = [0] * (len(bounds) + 1)
        self.exemplars: list[Exemplar | None] = [None] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, exemplar: Mapping[str, str] | None) -> None:
        index = bisect_left(self.bounds, value)
        self.counts[index] += 1
        self.sum += value
        if self.exponential is not None:
            self.exponential.observe(value)
        if exemplar:
            self.exemplars[index] = Exemplar(labels=exemplar, value=value, unix_seconds=time.time())

    def observe_all(self, values: Iterable[float]) -> None:
        bounds, counts, total = self.bounds, self.counts, self.sum
        for value in values:  # a plain loop: it runs for every collective
            counts[bisect_left(bounds, value)] += 1
            total += value
            if self.exponential is not None:
                self.exponential.observe(value)
        self.sum = total

    def freeze(self) -> Distribution:
        return Distribution(
            counts=tuple(self.counts),
            sum=self.sum,
            exemplars=tuple(self.exemplars),
            exponential=None if self.exponential is None else self.exponential.freeze(),
        )


class Recorder:
    """Holds the current value of every series of this process. Safe to use from any thread.

    Examples:
        >>> recorder = Recorder()
        >>> recorder.add(STEPS, 2)
        >>> recorder.snapshot().value(STEPS)
        2.0

    Attributes:
        counts_exponentially: Whether histograms also count in exponential buckets, which OTLP can
            send. Takes effect for histograms without observations.
    """

    def __init__(self) -> None:
        # The lock is re-entrant, so a thread can write single values inside a commit.
        self._lock = threading.RLock()
        self._values: dict[MetricSpec, dict[LabelValues, float]] = {}
        self._histograms: dict[MetricSpec, dict[LabelValues, _Histogram]] = {}
        self._functions: dict[tuple[MetricSpec, LabelValues], Callable[[], float]] = {}
        self.counts_exponentially = False

    def commit(self) -> AbstractContextManager[object]:
        """Return a context manager. All writes inside the context become visible together."""
        return self._lock

    def set(self, spec: MetricSpec, value: float, *labels: str) -> None:
        """Set a gauge to `value`. Also sets a counter, if the caller knows its total."""
        with self._lock:
            self._series(spec, labels)[labels] = value

    def set_function(self, spec: MetricSpec, function: Callable[[], float], *labels: str) -> None:
        """Take a gauge's value from `function` in each snapshot. `function` must not raise."""
        with self._lock:
            _check_labels(spec, labels)
            self._functions[spec, labels] = function

    def add(self, spec: MetricSpec, amount: float, *labels: str) -> None:
        """Increase a counter by `amount`, which must not be negative."""
        with self._lock:
            series = self._series(spec, labels)
            series[labels] = series.get(labels, 0.0) + amount

    def add_all(self, spec: MetricSpec, amounts: Iterable[float], *labels: str) -> None:
        """Increase a counter by several amounts, as `add` would one by one."""
        with self._lock:
            series = self._series(spec, labels)
            value = series.get(labels, 0.0)
            for amount in amounts:
                value += amount
            series[labels] = value

    def start_counters(self, specs: Iterable[MetricSpec], **known: Iterable[str]) -> None:
        """Start at 0 those of the metrics that are counters with `from_zero`.

        A part of monitoring calls this method when it begins to count. Values of earlier parts are
        kept.

        Args:
            specs: The metrics of the part.
            known: The values of labels that only a run knows, such as the devices.
        """
        with self._lock:
            for spec in specs:
                if spec.from_zero:
                    for labels in spec.label_combinations(**known):
                        self.add(spec, 0, *labels)

    def remove(self, spec: MetricSpec, *labels: str) -> None:
        """Remove a series of a gauge, if it exists."""
        with self._lock:
            self._values.get(spec, {}).pop(labels, None)

    def set_info(self, spec: MetricSpec, *labels: str) -> None:
        """Replace the labels of an info metric."""
        with self._lock:
            self._series(spec, labels)
            self._values[spec] = {labels: 1.0}

    def observe(
        self,
        spec: MetricSpec,
        value: float,
        *labels: str,
        exemplar: Mapping[str, str] | None = None,
    ) -> None:
        """Add an observation to a histogram.

        Args:
            spec: The histogram.
            value: The observation, in the metric's unit.
            labels: The values of the metric's labels, in the order of the labels.
            exemplar: Labels that identify the observation elsewhere, such as a trace id.
        """
        with self._lock:
            self._histogram(spec, labels).observe(value, exemplar)

    def observe_all(self, spec: MetricSpec, values: Iterable[float], *labels: str) -> None:
        """Add several observations without exemplars to a histogram."""
        with self._lock:
            self._histogram(spec, labels).observe_all(values)

    def add_exemplar(self, spec: MetricSpec, *labels: str, exemplar: Exemplar) -> None:
        """Attach an exemplar to an earlier observation. Does nothing if its bucket is empty."""
        with self._lock:
            known = self._histograms.get(spec, {}).get(labels)
            index = bisect_left(spec.buckets, exemplar.value)
            if known is not None and known.counts[index]:
                known.exemplars[index] = exemplar

    def value(self, spec: MetricSpec, *labels: str) -> float | None:
        """Return the value of one series now, without a copy of the others; None without one."""
        with self._lock:
            return self._values.get(spec, {}).get(labels)

    def snapshot(self) -> Snapshot:
        """Return a copy of all values. The copy contains each commit completely or not at all."""
        with self._lock:
            values = {spec: dict(series) for spec, series in self._values.items()}
            for (spec, labels), function in self._functions.items():
                values.setdefault(spec, {})[labels] = float(function())
            return Snapshot(
                values=values,
                distributions={
                    spec: {labels: h.freeze() for labels, h in series.items()}
                    for spec, series in self._histograms.items()
                },
            )

    def _histogram(self, spec: MetricSpec, labels: LabelValues) -> _Histogram:
        known = self._histograms.get(spec, {}).get(labels)
        if known is None:
            _check_labels(spec, labels)
            known = _Histogram(spec.buckets, is_exponential=self.counts_exponentially)
            self._histograms.setdefault(spec, {})[labels] = known
        return known

    def _series(self, spec: MetricSpec, labels: LabelValues) -> dict[LabelValues, float]:
        series = self._values.get(spec)
        if series is not None and labels in series:
            return series
        _check_labels(spec, labels)
        return self._values.setdefault(spec, {})


def _check_labels(spec: MetricSpec, labels: LabelValues) -> None:
    """Raise an error if the labels of a new series do not fit its spec. Called once per series."""
    if len(labels) != len(spec.labels):
        raise ValueError(f"{spec.name} takes labels {spec.label_names}, got {labels}")
    for label, value in zip(spec.labels, labels, strict=True):
        if label.values and value not in label.values:
            raise ValueError(f"{spec.name}: {label.name}={value!r} is none of {label.values}")
