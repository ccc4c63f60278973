"""The description of a metric: name, kind, labels and help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram", "info"]
PREFIX = "zerowatch_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A label's name and the closed set of values it may take.

    An empty set marks a label whose few values are known only at run time, such as a device.
    """

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MetricSpec:
    """One metric of the catalog. Compared by identity, because values are stored under it.

    `labels` does not contain `rank`, which the exporter adds to every series. `buckets` are a
    histogram's upper bounds in the metric's unit, ascending, without +Inf.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels, in the order in which values are given."""
        return tuple(label.name for label in self.labels)


def counter(name: str, help: str, *labels: Label) -> MetricSpec:
    """Describe a value that only increases; `name` ends in `_total`."""
    return MetricSpec(name=PREFIX + name, kind="counter", help=help, labels=labels)


def gauge(name: str, help: str, *labels: Label) -> MetricSpec:
    """Describe a value that goes up and down."""
    return MetricSpec(name=PREFIX + name, kind="gauge", help=help, labels=labels)


def histogram(name: str, help: str, buckets: tuple[float, ...], *labels: Label) -> MetricSpec:
    """Describe a distribution with upper bounds `buckets`."""
    return MetricSpec(
        name=PREFIX + name, kind="histogram", help=help, labels=labels, buckets=buckets
    )


def info(name: str, help: str, *labels: Label) -> MetricSpec:
    """Describe properties as labels, with the constant value 1."""
    return MetricSpec(name=PREFIX + name, kind="info", help=help, labels=labels)
