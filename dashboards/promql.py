"""Writes PromQL expressions about the metrics of the catalog.

All expressions keep the labels job and run, so that the series of different runs are never mixed.
An expression that keeps the rank also keeps its node, the name of its host: an alert on a rank must
name the host. A matcher is PromQL text such as `phase="data"`.
"""

from __future__ import annotations

from ..metrics.catalog.spec import MetricSpec
from ..metrics.catalog.training import RUN_START_TIMESTAMP
from .timing import HOUR, MINUTE, Timing

IDENTITY = ("job", "run")  # the labels that together identify a run
RANK, NODE = "rank", "node"
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


def last_value(spec: MetricSpec, timing: Timing, *matchers: str, seconds: float = MINUTE) -> str:
    """Return the last value of a minute, or of so many seconds.

    A fault that ends the process may be in a single scrape. An instant selector misses that value
    if no evaluation of the rules comes before the process is gone.
    """
    return f"last_over_time({select(spec, *matchers)}[{timing.duration(seconds)}])"


def rate(spec: MetricSpec, time_range: str, *matchers: str, part: str = "") -> str:
    """Return the rate per second of a counter over a range such as "5m"."""
    return f"rate({select(spec, *matchers, part=part)}[{time_range}])"


def increase(
    spec: MetricSpec, timing: Timing, seconds: float, *matchers: str, of_ended: bool = False
) -> str:
    """Return the increase of a counter over a range, also of a series that is new.

    PromQL's `increase` misses the first value of a series: if a run is scraped for the first time
    after 20 steps without a finite loss, the counter begins at 20. A series that only missed
    scrapes is not new. After a longer gap, such as a restart of Prometheus, only the age of its
    process and of its run shows that it is not: one that had run for an hour would have been
    scraped. A process may begin a further run at any age.

    Args:
        spec: The counter.
        timing: Scales the range.
        seconds: The range.
        matchers: Label matchers.
        of_ended: Whether the first value also counts after the process has ended, for the rest of
            the range: an event may end the process after a single scrape.
    """
    series, time_range = select(spec, *matchers), timing.duration(seconds)

    def value(selector: str) -> str:
        return f"last_over_time({selector}[{time_range}])" if of_ended else selector

    # By its address: the rank may have had another process within the range.
    on_process = "on (job, instance, run, rank)"
    long_ago = f"time() - {timing.seconds(seconds + HOUR)}"
    is_old = f"{value('process_start_time_seconds')} < {long_ago}"
    is_young = f"{on_process} {value(select(RUN_START_TIMESTAMP))} >= {long_ago}"
    read = earlier("process_start_time_seconds", time_range)
    unread = f"({is_old}\nunless {is_young}\nunless {read})"
    born = f"{value(series)} > 0 unless {earlier(series, time_range)}\nunless {on_process} {unread}"
    return f"(\n({born})\nor increase({series}[{time_range}])\n)"


def earlier(series: str, time_range: str, gap: str = "5m") -> str:
    """Return the value that a series had a range ago, or up to `gap` before.

    A plain `offset` finds nothing if the scrape before that moment failed: Prometheus ends a series
    at each failed scrape.
    """
    return f"last_over_time({series}[{gap}] offset {time_range})"


def with_node(labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return `labels` with the node of a rank after the rank.

    A rank has one node for as long as its process lives, so the node adds no series.
    """
    if RANK not in labels or NODE in labels:
        return labels
    after = labels.index(RANK) + 1
    return (*labels[:after], NODE, *labels[after:])


def by(operation: str, expression: str, *labels: str) -> str:
    """Return an aggregation over all labels except job, run and `labels`, and a rank's node."""
    return f"{operation} by ({', '.join((*IDENTITY, *with_node(labels)))}) ({expression})"


def where(expression: str, condition: str, *labels: str) -> str:
    """Return `expression` restricted to series that `condition` has too.

    Two series belong together if they agree in job, run and `labels`.
    """
    return f"{expression}\nand on ({', '.join((*IDENTITY, *labels))}) {condition}"


def ratio(part: str, whole: str, *labels: str) -> str:
    """Return a division, whose operands are matched by job, run and `labels`, and a rank's node.

    `part` may have further labels. If `whole` is 0 there is no result instead of infinity: the rate
    of steps is 0 during an evaluation that is longer than the range.
    """
    names = ", ".join((*IDENTITY, *with_node(labels)))
    return f"{part}\n/ on ({names}) group_left ()\n({whole} > 0)"


def recorded_name(level: str, spec: MetricSpec, operation: str) -> str:
    """Return the name of a recording rule by the convention level:metric:operations.

    Source: prometheus.io/docs/practices/rules, by which the name of a rate has no `_total`.
    """
    metric = spec.name.removesuffix("_total") if "rate" in operation else spec.name
    return f"{level}:{metric}:{operation}"
