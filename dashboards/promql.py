"""Writes PromQL expressions about the metrics of the catalog.

All expressions keep the labels job and run, so that the series of different runs are never mixed. A
matcher is PromQL text such as `phase="data"`.
"""

from __future__ import annotations

from ..metrics.catalog.spec import MetricSpec

IDENTITY = ("job", "run")  # the labels that together identify a run
# Matchers of the label `device`.
ON_GPU = 'device!="cpu"'
ON_HOST = 'device="cpu"'


def select(spec: MetricSpec, *matchers: str, part: str = "") -> str:
    """Return an instant selector of a metric.

    Args:
        spec: The metric.
        matchers: Label matchers.
        part: For a histogram "_bucket", "_sum" or "_count"; otherwise empty.
    """
    braces = f"{{{', '.join(matchers)}}}" if matchers else ""
    return f"{spec.name}{part}{braces}"


def rate(spec: MetricSpec, time_range: str, *matchers: str, part: str = "") -> str:
    """Return the rate per second of a counter over a range such as "5m"."""
    return f"rate({select(spec, *matchers, part=part)}[{time_range}])"


def by(operation: str, expression: str, *labels: str) -> str:
    """Return an aggregation over all labels except job, run and `labels`."""
    return f"{operation} by ({', '.join((*IDENTITY, *labels))}) ({expression})"


def where(expression: str, condition: str, *labels: str) -> str:
    """Return `expression` restricted to series that `condition` has too.

    Two series belong together if they agree in job, run and `labels`.
    """
    return f"{expression}\nand on ({', '.join((*IDENTITY, *labels))}) {condition}"


def ratio(part: str, whole: str, *labels: str) -> str:
    """Return a division, whose operands are matched by job, run and `labels`.

    `part` may have further labels. If `whole` is 0 there is no result instead of infinity: the rate
    of steps is 0 during an evaluation that is longer than the range.
    """
    names = ", ".join((*IDENTITY, *labels))
    return f"{part}\n/ on ({names}) group_left ()\n({whole} > 0)"


def recorded_name(level: str, spec: MetricSpec, operation: str) -> str:
    """Return the name of a recording rule by the convention level:metric:operations.

    Source: prometheus.io/docs/practices/rules, by which the name of a rate has no `_total`.
    """
    metric = spec.name.removesuffix("_total") if "rate" in operation else spec.name
    return f"{level}:{metric}:{operation}"
