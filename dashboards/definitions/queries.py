"""Selects series of the run, the node and the ranks that are chosen at the top of a dashboard."""

from __future__ import annotations

from collections.abc import Callable

from ...metrics.catalog.devices import DEVICE_INFO
from ...metrics.catalog.spec import MetricSpec
from ...metrics.catalog.training import SHARED_WORK
from ...metrics.thresholds import Threshold
from ..grafana.panels import Query
from ..limits import selected
from ..promql import ON_GPU, ON_HOST, by, select, where
from ..recording_rules import GOODPUT, RUN_ATTEMPT, RUN_STATE, RecordingRule, rate_since_start
from ..run_status import FIRST_END, RunStatus
from ..timing import Timing

# Grafana escapes a value for `=~` only if several can be chosen, so one value is compared by `=`.
JOBS = ('job=~"$job"',)  # of a dashboard about several runs
RUN = ('job="$job"', 'run="$run"')
RANKS = (*RUN, 'node=~"$node"', 'rank=~"$rank"')
FIRST_RANK = (*RUN, 'rank="0"')  # for metrics that are equal on all ranks, or on rank 0 only
WINDOW = "$__rate_interval"  # Grafana's shortest range that contains at least two scrapes
WORST = 8  # the most ranks that a graph shows
RANK = ("rank", "node")  # the labels of a rank; its node is where to look
DEVICE = (*RANK, "device")
_ANSWERS = "2m"  # a run whose ranks have not answered for longer has vanished


def of_run(what: RecordingRule | MetricSpec, *matchers: str) -> str:
    """Return a selector of all series of the chosen run."""
    return _select(what, *RUN, *matchers)


def of_ranks(what: RecordingRule | MetricSpec, *matchers: str) -> str:
    """Return a selector of the series of the chosen ranks."""
    return _select(what, *RANKS, *matchers)


def of_devices(rule: RecordingRule, *matchers: str, label: str = "", operation: str = "max") -> str:
    """Return the maximum over all GPUs, or over the hosts in a run without GPUs.

    Args:
        rule: A rule with the label device.
        matchers: Further matchers.
        label: A label besides job and run that the result keeps.
        operation: An aggregation in place of the maximum.
    """
    labels = (label,) if label else ()
    gpus, host = (
        by(operation, of_run(rule, matcher, *matchers), *labels) for matcher in (ON_GPU, ON_HOST)
    )
    return f"{gpus}\nor on (job, run) {host}"


def of_first_rank(what: RecordingRule | MetricSpec, *matchers: str) -> str:
    """Return a selector of the series of rank 0."""
    return _select(what, *FIRST_RANK, *matchers)


def worst(
    rule: RecordingRule,
    *matchers: str,
    lowest: bool = False,
    count: int = WORST,
    also: str = "",
    among: Callable[..., str] | None = None,
) -> str:
    """Return a selector of the ranks with the worst mean over the time range shown.

    The ranks are chosen once for the whole graph. If they were chosen at each point in time, a
    graph of a thousand ranks would show most of them.

    Args:
        rule: A rule with the label rank.
        matchers: Further matchers.
        lowest: Whether low values are bad, instead of high ones.
        count: The maximum number of series.
        also: A further label that distinguishes series of a rank, such as the device.
        among: `of_run` for all ranks; by default the chosen ones.
    """
    selector = (among or of_ranks)(rule, *matchers)
    operation = "bottomk" if lowest else "topk"
    averages = f"avg_over_time({selector}[$__range] @ end())"
    return where(selector, f"{operation}({count}, {averages})", *RANK, *filter(None, [also]))


def by_node(operation: str, rule: RecordingRule, *matchers: str) -> str:
    """Return an aggregation over the chosen ranks of each node."""
    return by(operation, of_ranks(rule, *matchers), "node")


def by_rank(operation: str, rule: RecordingRule, *matchers: str) -> str:
    """Return a series for each of the chosen ranks, aggregated over its devices and groups."""
    return by(operation, of_ranks(rule, *matchers), *RANK)


def state_of(*matchers: str) -> str:
    """Return the state of runs, also of those that ended within the time range shown."""
    recent, last = (
        by("max", f"last_over_time({RUN_STATE.select(*matchers)}[{time_range}])")
        for time_range in (_ANSWERS, "$__range")
    )
    return (
        f"{recent}\nor on (job, run) {last} >= {FIRST_END:d}"
        f"\nor on (job, run) {RunStatus.VANISHED:d} * {last} ^ 0"
    )


def latest(rule: RecordingRule, *matchers: str) -> str:
    """Return the last value of a rule of runs within the time range shown."""
    return by("max", f"last_over_time({rule.select(*matchers)}[$__range])")


def last_goodput(*matchers: str) -> str:
    """Return the last goodput of runs within the time range shown, except of restarted runs."""
    attempt = latest(RUN_ATTEMPT, *matchers)
    return f"{latest(GOODPUT, *matchers)}\nunless on (job, run) {attempt} > 0"


def last_known(selector: str, *labels: str) -> str:
    """Return the present values of series of a run, or else the last within the time range shown.

    Args:
        selector: The series, such as a result of `of_run`, of which any rank shows the whole run.
        labels: The labels that the result keeps besides job and run.
    """
    last = by("max", f"last_over_time({selector}[$__range])", *labels)
    return f"{by('max', selector, *labels)}\nor on (job, run) {last}"


def quantile(share: float, buckets: RecordingRule, *labels: str) -> str:
    """Return a quantile, estimated from the recorded rates of a histogram's buckets.

    Args:
        share: The quantile, 0 to 1.
        buckets: The rule that records the rates of the buckets.
        labels: Labels besides job and run that the result keeps.
    """
    return f"histogram_quantile({share}, {by('sum', of_run(buckets), 'le', *labels)})"


def limit(threshold: Threshold, legend: str = "limit", *, only_if: str = "") -> Query:
    """Return the query of a graph that draws the threshold of the chosen run as a dashed line.

    Args:
        threshold: The threshold.
        legend: The name of the line.
        only_if: PromQL; if given, the line is drawn only for a run that has a series of it.
    """
    value = selected(threshold, *RUN)
    return Query(where(value, only_if) if only_if else value, legend, is_limit=True)


def rate_of_ranks(spec: MetricSpec, work: str = "", *, operation: str = "sum") -> str:
    """Return the rate per second of a counter over five minutes, summed over the chosen ranks.

    Over `WINDOW`, a rate would jump between 0 and too much if a step takes longer than it.

    Args:
        spec: The counter.
        work: "samples" or "tokens" if it counts them: then there is no result for a run whose ranks
            share them, because the sum would be too large.
        operation: An aggregation in place of the sum.
    """
    timing = Timing()
    whole = rate_since_start(operation, spec, timing, *RANKS)
    if not work:
        return whole
    shared = select(SHARED_WORK, *RUN, f'of="{work}"')
    return f"{whole}\nunless on (job, run) last_over_time({shared}[{timing.short}])"


def total(spec: MetricSpec, *labels: str) -> str:
    """Return the value of a counter since the start of each rank, summed over the chosen ranks.

    Of a rank that does not answer it is the last value within the time range shown, also while
    others answer: after a crash, an error of before counts.
    """
    present = of_ranks(spec)
    last = f"last_over_time({present}[$__range])\nunless on (job, run, rank) {present}"
    return by("sum", f"{present}\nor {last}", *labels)


def total_of_devices(spec: MetricSpec, *labels: str) -> str:
    """Return the sum of a state of devices over the chosen ranks, each device once.

    Of a rank that does not answer it is the last value within the time range shown, unless another
    rank has its card now, as after a restart with fewer ranks. Cards are compared by UUID: where
    each process sees one GPU only, all ranks of a node call theirs cuda:0. A rank of which no UUID
    is known counts.
    """
    present, place = of_ranks(spec), f"job, run, {', '.join(DEVICE)}"
    last = f"last_over_time({present}[$__range])\nunless on (job, run, rank) {present}"
    known = f"last_over_time({of_ranks(DEVICE_INFO)}[$__range])"
    # One card of each rank, which may have had several, that no rank has now.
    free = f"topk by ({place}) (1, {known}\nunless on (job, run, uuid) {of_run(DEVICE_INFO)})"
    cards = by("max", f"({last})\n* on ({place}) group_left (uuid) {free}", "uuid", *labels)
    unknown = by("max", f"{last}\nunless on ({place}) {known}", *DEVICE, *labels)
    return by("sum", f"{present}\nor {cards}\nor {unknown}", *labels)


def _select(what: RecordingRule | MetricSpec, *matchers: str) -> str:
    if isinstance(what, MetricSpec):
        return select(what, *matchers)
    return what.select(*matchers)
