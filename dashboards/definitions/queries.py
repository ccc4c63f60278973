"""Queries for the run and the ranks that are chosen at the top of a dashboard."""

from __future__ import annotations

from ...metrics.catalog.spec import MetricSpec
from ..promql import by, rate, select, where
from ..recording_rules import RecordingRule

RUN = ('job=~"$job"', 'run=~"$run"')
RANKS = (*RUN, 'rank=~"$rank"')
FIRST_RANK = (*RUN, 'rank="0"')  # for metrics that are equal on all ranks, or on rank 0 only
WINDOW = "$__rate_interval"  # the least in which Grafana is sure to find two scrapes
WORST = 8  # lines that a graph shows of many ranks


def of_run(what: RecordingRule | MetricSpec, *matchers: str) -> str:
    """Select a run's series."""
    return _select(what, *RUN, *matchers)


def of_ranks(what: RecordingRule | MetricSpec, *matchers: str) -> str:
    """Select the chosen ranks' series."""
    return _select(what, *RANKS, *matchers)


def of_first_rank(what: RecordingRule | MetricSpec, *matchers: str) -> str:
    """Select rank 0's series."""
    return _select(what, *FIRST_RANK, *matchers)


def worst(
    rule: RecordingRule, *matchers: str, lowest: bool = False, count: int = WORST, also: str = ""
) -> str:
    """Select the ranks that were worst on average over the time shown.

    The choice is made once for the whole graph. With a choice at each point, a graph of a
    thousand ranks would show most of them.

    Args:
        rule: What is recorded for each rank.
        matchers: Further matchers.
        lowest: Whether low values are the bad ones.
        count: How many lines there are at most.
        also: A label besides rank that distinguishes series.
    """
    selector = of_ranks(rule, *matchers)
    operation = "bottomk" if lowest else "topk"
    averages = f"avg_over_time({selector}[$__range] @ end())"
    return where(selector, f"{operation}({count}, {averages})", "rank", *filter(None, [also]))


def quantile(share: float, buckets: RecordingRule, *labels: str) -> str:
    """Estimate a quantile from the recorded rates of a histogram's buckets."""
    return f"histogram_quantile({share}, {by('sum', of_run(buckets), 'le', *labels)})"


def rate_of_ranks(spec: MetricSpec) -> str:
    """Add up a counter's rate over the chosen ranks.

    A recorded rate over five minutes would rise for that long after a start.
    """
    return by("sum", rate(spec, WINDOW, *RANKS))


def total(spec: MetricSpec, *labels: str) -> str:
    """Add up a counter over the chosen ranks, from each rank's start to now."""
    return by("sum", of_ranks(spec), *labels)


def _select(what: RecordingRule | MetricSpec, *matchers: str) -> str:
    if isinstance(what, MetricSpec):
        return select(what, *matchers)
    return what.select(*matchers)
