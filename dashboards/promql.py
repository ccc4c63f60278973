"""PromQL from the catalog's metrics. The functions that need one are here; the rest is plain text.

A matcher is PromQL's own text, such as `phase="data"`.
"""

from __future__ import annotations

from ..metrics.catalog.spec import MetricSpec

IDENTITY = ("job", "run")  # what distinguishes the series of two runs
ON_GPU, ON_HOST = 'device!="cpu"', 'device="cpu"'


def select(spec: MetricSpec, *matchers: str, part: str = "") -> str:
    """Write an instant selector.

    Args:
        spec: The metric.
        matchers: Label matchers.
        part: Of a histogram the series: "_bucket", "_sum" or "_count".
    """
    braces = f"{{{', '.join(matchers)}}}" if matchers else ""
    return f"{spec.name}{part}{braces}"


def rate(spec: MetricSpec, time_range: str, *matchers: str, part: str = "") -> str:
    """Write the rate per second of a counter over a range such as "5m"."""
    return f"rate({select(spec, *matchers, part=part)}[{time_range}])"


def by(operation: str, expression: str, *labels: str) -> str:
    """Aggregate over all labels but job, run and those named."""
    return f"{operation} by ({', '.join((*IDENTITY, *labels))}) ({expression})"


def where(expression: str, condition: str, *labels: str) -> str:
    """Keep the series of which, by job, run and the labels named, the condition has one too."""
    return f"{expression}\nand on ({', '.join((*IDENTITY, *labels))}) {condition}"


def ratio(part: str, whole: str, *labels: str) -> str:
    """Divide, matching job, run and the labels named; `part` may have more labels than `whole`.

    Where `whole` is 0 there is no result, rather than infinity: an evaluation that is longer than
    the range has no steps in it.
    """
    names = ", ".join((*IDENTITY, *labels))
    return f"{part}\n/ on ({names}) group_left ()\n({whole} > 0)"


def recorded_name(level: str, spec: MetricSpec, operation: str) -> str:
    """Name a recording rule as Prometheus advises: level:metric:operations.

    Source: prometheus.io/docs/practices/rules (the metric loses `_total` under a rate).
    """
    metric = spec.name.removesuffix("_total") if "rate" in operation else spec.name
    return f"{level}:{metric}:{operation}"
