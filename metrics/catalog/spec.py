"""Describes a metric as plain data: name, kind, labels and help text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Literal, TypedDict, Unpack

Kind = Literal["counter", "gauge", "histogram", "info", "summary"]
# The words at the end of a name that are a unit. Names with "per" have none of these alone.
_UNITS = ("seconds", "bytes", "ratio", "watts", "celsius", "hertz", "joules")
PREFIX = "zerowatch_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """The name of a label and the values that it may have.

    If the tuple is empty, the values are known only at run time, such as devices. They are few.
    """

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lean:
    """The series of a metric that `serve.detail = "lean"` serves.

    A histogram keeps its sum and count, and loses all buckets but +Inf.

    Attributes:
        without: Labels that are left out of a counter. Series that differ in them are added up.
        only: For each label named here, the values whose series are served.
    """

    without: tuple[str, ...] = ()
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


EVERY_SERIES = Lean()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MetricSpec:
    """The name, kind, help text and labels of one metric.

    Two specs are equal only if they are the same object: the recorder uses them as dictionary keys.

    Attributes:
        name: The full name, with prefix and unit.
        kind: The type of the metric.
        help: The help text that is exported.
        labels: The labels, without `rank`, which the exporter adds to every series.
        buckets: The upper bounds of a histogram in the metric's unit, ascending, without +Inf.
        lean: What is served with `serve.detail = "lean"`; None if nothing.
        usual: Usual values, and when to worry. The documentation shows it. The figures are rules of
            thumb, unless the text names a source.
        from_zero: Whether all series of a counter start at 0 together with the feature that counts.
            Prometheus' `increase` does not see an event with which a series begins.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    lean: Lean | None = None
    from_zero: bool = False
    usual: str = ""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the name, because specs are equal only if they are the same object."""
        return _from_catalog, (self.name,)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels, in the order in which label values are passed."""
        return tuple(label.name for label in self.labels)

    @property
    def unit(self) -> str:
        """The unit at the end of the name, such as "seconds", or an empty text."""
        words = self.name.removesuffix("_total").split("_")
        return words[-1] if words[-1] in _UNITS and "per" not in words else ""

    def label_combinations(self, **known: Iterable[str]) -> Iterator[tuple[str, ...]]:
        """Yield the label values of all series.

        Args:
            known: The values of labels of which the spec knows none, such as the devices.
        """
        return product(*(label.values or known[label.name] for label in self.labels))


def _from_catalog(name: str) -> MetricSpec:
    from . import BY_NAME  # it imports this module

    return BY_NAME[name]


class _Options(TypedDict, total=False):
    """What each kind of metric may have besides its name, help text and labels."""

    lean: Lean | None
    usual: str


def counter(
    name: str, help: str, *labels: Label, from_zero: bool = False, **options: Unpack[_Options]
) -> MetricSpec:
    """Return the spec of a value that only increases; `name` ends in `_total`."""
    return MetricSpec(
        name=PREFIX + name,
        kind="counter",
        help=help,
        labels=labels,
        from_zero=from_zero,
        **options,
    )


def gauge(name: str, help: str, *labels: Label, **options: Unpack[_Options]) -> MetricSpec:
    """Return the spec of a value that can go up and down."""
    return MetricSpec(name=PREFIX + name, kind="gauge", help=help, labels=labels, **options)


def histogram(
    name: str,
    help: str,
    buckets: tuple[float, ...],
    *labels: Label,
    **options: Unpack[_Options],
) -> MetricSpec:
    """Return the spec of a histogram; `buckets` are the upper bounds."""
    return MetricSpec(
        name=PREFIX + name,
        kind="histogram",
        help=help,
        labels=labels,
        buckets=buckets,
        **options,
    )


def summary(name: str, help: str, *labels: Label, **options: Unpack[_Options]) -> MetricSpec:
    """Return the spec of quantiles that a part of monitoring computes, by the label `quantile`."""
    return MetricSpec(name=PREFIX + name, kind="summary", help=help, labels=labels, **options)


def info(name: str, help: str, *labels: Label, **options: Unpack[_Options]) -> MetricSpec:
    """Return the spec of a metric with the constant value 1, whose labels are properties."""
    return MetricSpec(name=PREFIX + name, kind="info", help=help, labels=labels, **options)
