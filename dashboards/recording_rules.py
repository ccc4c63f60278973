"""The recording rules: ratios and aggregates over ranks that panels and alerts query.

To add a rule, define a constant here and add it to its group in `GROUPS` at the end of the file.
Dashboards and alerts refer to a rule by its constant, never by its name.

A rule's name is level:metric:operations. The level lists the labels that the result keeps besides
`job`: a rule of level `run_rank` has the labels job, run and rank. It also has the node of the
rank, which the level leaves out. `rate5m` and `rate30m` are the two ranges of `Timing` as shipped,
and `median6h` is the median of six hours; tests scale them, and the names stay. A ratio over
several ranks divides the sums, because a mean of ratios would give every rank the same weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..metrics.catalog import communication as comm
from ..metrics.catalog import devices, generation, memory, overhead, training, window
from ..metrics.catalog.labels import NON_TRAINING_PHASES
from ..metrics.catalog.spec import MetricSpec
from ..metrics.thresholds import COMM_COVERAGE_LOW, THRESHOLDS
from .promql import (
    ON_GPU,
    ON_HOST,
    by,
    last_value,
    rate,
    ratio,
    recorded_name,
    select,
    where,
    with_node,
)
from .run_status import STATE_BY_REASON, RunStatus
from .timing import HOUR, MINUTE, SHORT_SECONDS, Timing

# The series of rank 0 stand for the whole run.
_RANK_0 = 'rank="0"'
_RANK_0_PROCESS = f"process_start_time_seconds{{{_RANK_0}}}"  # when it was started

# The phases that count as training time, the denominator of the ratios.
TRAINING_PHASES = f'phase!~"{"|".join(NON_TRAINING_PHASES)}"'


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRule:
    """An expression that Prometheus evaluates and stores under a new name.

    Attributes:
        name: The name of the stored series, level:metric:operations.
        expression: Returns the PromQL, given the ranges to use.
        labels: The labels of the result, besides job.
    """

    name: str
    expression: Callable[[Timing], str]
    labels: tuple[str, ...]

    def select(self, *matchers: str) -> str:
        """Return a PromQL selector of the stored series."""
        return f"{self.name}{{{', '.join(matchers)}}}" if matchers else self.name


def recorded(
    spec: MetricSpec, operation: str, expression: Callable[[Timing], str], *labels: str
) -> RecordingRule:
    """Return a rule for `expression`, whose result keeps job, run and `labels`."""
    return RecordingRule(
        name=recorded_name("_".join(("run", *labels)), spec, operation),
        expression=expression,
        labels=("run", *with_node(labels)),
    )


def aggregated(spec: MetricSpec, operation: str, *labels: str) -> RecordingRule:
    """Return a rule that aggregates a gauge over all labels except job, run and `labels`."""
    return recorded(spec, operation, lambda timing: by(operation, select(spec), *labels), *labels)


def summed_rate(spec: MetricSpec, *labels: str, part: str = "") -> RecordingRule:
    """Return a rule that sums a counter's rate per second over ranks.

    Args:
        spec: The counter or histogram.
        labels: The labels that the result keeps besides job and run.
        part: For a histogram "_bucket", "_sum" or "_count"; empty for a counter.
    """
    named = recorded_name("_".join(("run", *labels)), spec, "rate5m")
    if part:
        named = named.replace(spec.name, spec.name + part)
    return RecordingRule(
        name=named,
        expression=lambda timing: by("sum", rate(spec, timing.short, part=part), *labels),
        labels=("run", *with_node(labels)),
    )


def per_step(spec: MetricSpec, *labels: str, operation: str = "per_step_rate5m") -> RecordingRule:
    """Return a rule for the increase of a counter in one step, as a mean over ranks.

    Both rates rise for the same five minutes after a start, so that their quotient is right from
    the beginning; a rate per second would be too low during that time.
    """
    return recorded(
        spec,
        operation,
        lambda timing: ratio(
            by("sum", rate(spec, timing.short), *labels),
            by("sum", rate(training.STEPS, timing.short)),
        ),
        *labels,
    )


def training_share(
    spec: MetricSpec, *labels: str, per: tuple[str, ...] = (), long: bool = False
) -> RecordingRule:
    """Return a rule for the share of training time that a counter of seconds takes.

    Args:
        spec: The counter, in seconds.
        labels: Labels that divide the share into parts, such as the cause.
        per: Labels that have a training time of their own, such as the rank.
        long: Whether to use the range of 30 minutes instead of 5.
    """

    def expression(timing: Timing) -> str:
        time_range = timing.long if long else timing.short
        whole = by("sum", rate(training.PHASE_SECONDS, time_range, TRAINING_PHASES), *per)
        return ratio(by("sum", rate(spec, time_range), *per, *labels), whole, *per)

    operation = "ratio_rate30m" if long else "ratio_rate5m"
    return recorded(spec, operation, expression, *per, *labels)


def effective_thresholds(defaults: Mapping[str, float]) -> RecordingRule:
    """Return the rule for the thresholds of each run: its own, or the default.

    Args:
        defaults: Values in place of those in `metrics/thresholds.py`, by name.
    """
    runs = by("max", select(training.RUN_ACTIVE))
    lines = [
        f'label_replace(0 * {runs} + {value:.12g}, "name", "{name}", "", "")'
        for name, value in {**THRESHOLDS, **defaults}.items()
    ]

    def expression(timing: Timing) -> str:
        # A failed scrape of rank 0, which alone exports them, must not bring back the defaults.
        own = f"last_over_time({select(training.ALERT_THRESHOLD)}[{timing.short}])"
        return "\nor ".join([by("max", own, "name"), *lines])

    return recorded(training.ALERT_THRESHOLD, "effective", expression, "name")


def usual(rule: RecordingRule, spec: MetricSpec, operation: str, share: float) -> RecordingRule:
    """Return a rule for what is usual in a run: a quantile of the last six hours of `rule`.

    Args:
        rule: A rule without the label rank: six hours of a thousand ranks take too long to read.
        spec: The metric of the rule.
        operation: The operation in the name of the new rule.
        share: The quantile, 0 to 1.
    """
    return recorded(
        spec,
        operation,
        lambda timing: f"quantile_over_time({share}, {rule.select()}[{timing.history}])",
        *rule.labels[1:],
    )


ALERT_THRESHOLD = effective_thresholds({})

# Communication. Panels over time use the rules that keep no rank: a graph of the raw series of a
# thousand ranks would be too slow to load.
EXPOSED_RATIO = training_share(comm.COMM_EXPOSED_SECONDS)
EXPOSED_RATIO_LONG = training_share(comm.COMM_EXPOSED_SECONDS, long=True)
EXPOSED_RATIO_BY_RANK = training_share(comm.COMM_EXPOSED_SECONDS, per=("rank",))
EXPOSED_RATIO_BY_GROUP = training_share(comm.COMM_EXPOSED_SECONDS, "group")


def _comm_ratio(timing: Timing) -> str:
    # Runs of earlier versions have the seconds of each group only.
    union, groups = (
        training_share(spec).expression(timing)
        for spec in (comm.COMM_UNION_SECONDS, comm.COMM_SECONDS)
    )
    return f"{union}\nor on (job, run) {groups}"


COMM_RATIO = recorded(comm.COMM_UNION_SECONDS, "ratio_rate5m", _comm_ratio)
CAUSE_RATIO = training_share(comm.COMM_CAUSE_SECONDS, "cause")
EXPOSED_RATIO_USUAL = usual(EXPOSED_RATIO, comm.COMM_EXPOSED_SECONDS, "ratio_rate5m_median6h", 0.5)
COVERAGE = aggregated(comm.COMM_COVERAGE_RATIO, "min")
WAIT_RATIO_BY_RANK = training_share(comm.COMM_WAIT_SECONDS, per=("rank",))


def _least_waiting(timing: Timing) -> str:
    waits = WAIT_RATIO_BY_RANK.select()
    median, ranks = by("quantile", f"0.5, {waits}"), by("count", waits)
    # Of two ranks, the median is half way between both.
    others = f"({median} and on (job, run) {ranks} > 2 or {by('max', waits)})"
    coverage = by("min", f"avg_over_time({COVERAGE.select()}[{timing.short}])")
    least = ALERT_THRESHOLD.select(f'name="{COMM_COVERAGE_LOW.name}"')
    shortfall = f"{others}\n- on (job, run) group_right () {waits}"
    return where(shortfall, f"{coverage} >= on (job, run) {least}")


# By how much less a rank waits for others than the median rank. All ranks wait for a slow rank,
# which itself waits least. This shows stragglers where their phases are not compared, but not where
# collectives are missing: with DDP, only the script's own collectives have waits.
WAIT_SHORTFALL = recorded(comm.COMM_WAIT_SECONDS, "shortfall_rate5m", _least_waiting, "rank")
CALLS_PER_STEP = per_step(comm.COLLECTIVE_CALLS, "op")
COLLECTIVE_BUCKETS = summed_rate(comm.COLLECTIVE_DURATION, "op", "le", part="_bucket")
# The usual bandwidth of a group is the 90th percentile of six hours, because the highest of many
# estimates is an error of estimation sooner or later. The second lowest rank, because the lowest of
# a thousand estimates is another one.
LINK_SECOND_LOWEST = recorded(
    comm.COMM_LINK_BANDWIDTH,
    "second_lowest",
    lambda timing: by(
        "max",
        f"bottomk by (job, run, group) (2, {select(comm.COMM_LINK_BANDWIDTH)})",
        "group",
    ),
    "group",
)
LINK_BANDWIDTH_USUAL = usual(LINK_SECOND_LOWEST, comm.COMM_LINK_BANDWIDTH, "p90_6h", 0.9)
# Limited to 1. Where latency takes more time than data, an estimate is mostly noise and often far
# above the usual bandwidth.
LINK_BANDWIDTH_RATIO = recorded(
    comm.COMM_LINK_BANDWIDTH,
    "usual_ratio",
    lambda timing: (
        f"clamp_max(\n{by('min', select(comm.COMM_LINK_BANDWIDTH), 'rank', 'group')}\n"
        f"/ on (job, run, group) group_left () {LINK_BANDWIDTH_USUAL.select()},\n1)"
    ),
    "rank",
    "group",
)
BUS_BANDWIDTH = aggregated(comm.COMM_BUS_BANDWIDTH, "min", "op", "group")
VOLUME_RATIO = aggregated(comm.COMM_VOLUME_RATIO, "max")
STEP_WIRE_BYTES = aggregated(comm.COMM_STEP_WIRE_BYTES, "max", "kind")
STRAGGLER_SCORE = aggregated(comm.STRAGGLER_SCORE, "max", "rank", "phase")
WIRE_BYTES_PER_STEP = per_step(comm.COLLECTIVE_WIRE_BYTES, "op", "group")
PAYLOAD_BYTES_PER_STEP = per_step(comm.COLLECTIVE_BYTES, "op", "group")
LINK_BANDWIDTH = aggregated(comm.COMM_LINK_BANDWIDTH, "min", "group")
LINK_BEST_BANDWIDTH = aggregated(comm.COMM_LINK_BEST_BANDWIDTH, "max", "group")
LINK_LATENCY = aggregated(comm.COMM_LINK_LATENCY, "max", "group")
HEARTBEAT_AGE = aggregated(comm.PEER_HEARTBEAT_AGE, "max")
EXCHANGE_FAILURES_RATE = summed_rate(comm.EXCHANGE_FAILURES, "reason")

# Training.
STEPS_RATE = recorded(
    training.STEPS,
    "rate5m",
    # The maximum and not the sum: every rank takes the same steps.
    lambda timing: by("max", rate(training.STEPS, timing.short)),
)
MFU = aggregated(training.MFU, "avg")
MFU_USUAL = usual(MFU, training.MFU, "median6h", 0.5)
LOSS = aggregated(training.LOSS, "avg")
GRADIENT_NORM = aggregated(training.GRADIENT_NORM, "max")


def _median_of_hour(rule: RecordingRule, timing: Timing) -> str:
    return f"quantile_over_time(0.5, {rule.select()}[{timing.hour}])"


LOSS_MEDIAN = recorded(training.LOSS, "median1h", lambda timing: _median_of_hour(LOSS, timing))
# The loss falls during the hour, so each deviation is from the median of its own time.
LOSS_DEVIATION = recorded(
    training.LOSS, "deviation", lambda timing: f"abs({LOSS.select()} - {LOSS_MEDIAN.select()})"
)


def _loss_spike(timing: Timing) -> str:
    level, spread = f"abs({LOSS_MEDIAN.select()})", _median_of_hour(LOSS_DEVIATION, timing)
    scale = f"(10 * {spread} > {level} or {level})"
    return ratio(f"({LOSS.select()} - {LOSS_MEDIAN.select()})", scale)


# By how much the loss is above its median, over the median or ten times the median deviation,
# whichever is larger. A value of 0.5 is thus at least five median deviations. It is of use for
# flat losses, whose deviation is 0, and for negative ones.
LOSS_SPIKE = recorded(training.LOSS, "spike_ratio", _loss_spike)
GRADIENT_NORM_MEDIAN = recorded(
    training.GRADIENT_NORM, "median1h", lambda timing: _median_of_hour(GRADIENT_NORM, timing)
)
GRADIENT_NORM_RATIO = recorded(
    training.GRADIENT_NORM,
    "median_ratio",
    lambda timing: ratio(GRADIENT_NORM.select(), GRADIENT_NORM_MEDIAN.select()),
)
ACTIVE_RANKS = aggregated(training.RUN_ACTIVE, "sum")
STEP_BUCKETS = summed_rate(training.STEP_DURATION, "le", part="_bucket")
STEP_DURATION = recorded(
    training.STEP_DURATION,
    "mean_rate5m",
    lambda timing: ratio(
        by("sum", rate(training.STEP_DURATION, timing.short, part="_sum")),
        by("sum", rate(training.STEP_DURATION, timing.short, part="_count")),
    ),
)
STEP_DURATION_BY_RANK = recorded(
    training.STEP_DURATION,
    "mean_rate5m",
    lambda timing: ratio(
        by("sum", rate(training.STEP_DURATION, timing.short, part="_sum"), "rank"),
        by("sum", rate(training.STEP_DURATION, timing.short, part="_count"), "rank"),
        "rank",
    ),
    "rank",
)
PHASE_SECONDS_PER_STEP = per_step(training.PHASE_SECONDS, "phase")
PHASE_RATIO = training_share(training.PHASE_SECONDS, "phase")
DATA_RATIO_BY_RANK = recorded(
    training.PHASE_SECONDS,
    "data_ratio_rate5m",
    lambda timing: ratio(
        by("sum", rate(training.PHASE_SECONDS, timing.short, 'phase="data"'), "rank"),
        by("sum", rate(training.PHASE_SECONDS, timing.short, TRAINING_PHASES), "rank"),
        "rank",
    ),
    "rank",
)


# Generation between steps, as of DeepSpeed's hybrid engine.
GENERATING = 'phase="generate"'


def _of_generation(spec: MetricSpec) -> RecordingRule:
    """Return a rule for the growth of a counter in a second of generation, as a mean over ranks."""
    return recorded(
        spec,
        "per_generate_second_rate5m",
        lambda timing: ratio(
            by("sum", rate(spec, timing.short)),
            by("sum", rate(training.PHASE_SECONDS, timing.short, GENERATING)),
        ),
    )


GENERATION_SPEED = _of_generation(generation.GENERATED_TOKENS)
GENERATION_WAIT = _of_generation(generation.GENERATE_COMM_EXPOSED_SECONDS)
GENERATED_LENGTH = recorded(
    generation.GENERATED_TOKENS,
    "per_sequence_rate5m",
    lambda timing: ratio(
        by("sum", rate(generation.GENERATED_TOKENS, timing.short)),
        by("sum", rate(generation.GENERATED_SEQUENCES, timing.short)),
    ),
)
# With ZeRO 3 these calls gather parameters.
GATHERS_OF_GENERATION = recorded(
    comm.COLLECTIVE_CALLS,
    "generate_gathers_per_step_rate5m",
    lambda timing: ratio(
        by("sum", rate(comm.COLLECTIVE_CALLS, timing.short, 'op="all_gather"', GENERATING)),
        by("sum", rate(training.STEPS, timing.short)),
    ),
)
SKIPPED_RATIO = per_step(training.SKIPPED_STEPS, operation="ratio_rate5m")


def _last_checkpoint(timing: Timing) -> str:
    # Of one rank: the times of several differ a little, and would count as several checkpoints. If
    # a process saves at its end, the time may be read only once, between two evaluations.
    saved = select(training.LAST_CHECKPOINT_TIMESTAMP, _RANK_0)
    return by("max", f"last_over_time({saved}[{timing.short}])")


LAST_CHECKPOINT = recorded(training.LAST_CHECKPOINT_TIMESTAMP, "max", _last_checkpoint)


def _checkpoint_interval() -> str:
    process = by("max", _RANK_0_PROCESS)
    run = by("max", select(training.RUN_START_TIMESTAMP, _RANK_0))
    started = f"({run} > {process} or {process})"
    saved = by("max", select(training.CHECKPOINTS, _RANK_0, 'outcome="saved"'))
    # Where nothing marks the end of series, such as in a federation, the last checkpoint may be of
    # the process before.
    lasted = f"({by('max', LAST_CHECKPOINT.select())} - {started} > 0)"
    return ratio(lasted, f"{saved} > 1")


# The mean of the seconds between two checkpoints since the start of the process, as a run may have
# been down before, or of the run if a process began it later. A process that saved once has none.
CHECKPOINT_INTERVAL = recorded(
    training.LAST_CHECKPOINT_TIMESTAMP, "interval", lambda timing: _checkpoint_interval()
)


def _lately(rule: RecordingRule, function: str, timing: Timing) -> str:
    return f"{function}({rule.select()}[{timing.duration(2 * HOUR)}])"


def _hourly(rule: RecordingRule, function: str, operation: str) -> RecordingRule:
    """Return a rule for the value of `rule` in the last two hours, in one minute of each hour.

    A server may evaluate rules once a minute only. The second hour is of use if one minute was
    missed.
    """

    def expression(timing: Timing) -> str:
        lately = _lately(rule, function, timing)
        past_the_hour = f"vector(time()) % {timing.seconds(HOUR)}"
        return f"{lately}\nand on () ({past_the_hour} < {timing.seconds(MINUTE)})"

    return recorded(training.LAST_CHECKPOINT_TIMESTAMP, operation, expression)


def _remembered(
    rule: RecordingRule, hourly: RecordingRule, function: str, operation: str
) -> RecordingRule:
    """Return a rule for the value of `rule` in a week, for runs of which rank 0 is read.

    A process that was restarted has no checkpoint yet, and may never save one. A week of `rule` has
    forty thousand samples of each run, so all but the last two hours are read from `hourly`.

    While rank 0 is not read, it may save checkpoints of which nothing is known. A few failed
    scrapes must not end an alert: of a run that saves as usual, nothing is overdue ten minutes
    later. A run often saves at its end, which is read when it no longer trains.
    """

    def expression(timing: Timing) -> str:
        read = last_value(training.RUN_ACTIVE, timing, _RANK_0, seconds=10 * MINUTE)
        lately = _lately(rule, function, timing)
        before = f"{function}({hourly.select()}[{timing.week}])"
        return where(f"(\n{lately}\nor {before}\n)", read)

    return recorded(training.LAST_CHECKPOINT_TIMESTAMP, operation, expression)


LAST_CHECKPOINT_HOURLY = _hourly(LAST_CHECKPOINT, "max_over_time", "max_hourly")
CHECKPOINT_INTERVAL_HOURLY = _hourly(CHECKPOINT_INTERVAL, "last_over_time", "interval_hourly")
LAST_CHECKPOINT_IN_WEEK = _remembered(
    LAST_CHECKPOINT, LAST_CHECKPOINT_HOURLY, "max_over_time", "max_max7d"
)
CHECKPOINT_INTERVAL_IN_WEEK = _remembered(
    CHECKPOINT_INTERVAL, CHECKPOINT_INTERVAL_HOURLY, "last_over_time", "interval_last7d"
)

# When ranks were last read as training, and as ended in good order (to a minute). The times outlast
# the targets and a restart of Prometheus, so that an alert on a dead run can use them for hours.
IN_GOOD_ORDER = ("completed", "interrupted")
_BAD_END = f'reason!~"{"|".join(IN_GOOD_ORDER)}"'


def _active_at(*matchers: str) -> str:
    """Return the time of the last scrape of each rank that trains."""
    active = select(training.RUN_ACTIVE, *matchers)
    return f"timestamp({active}) and ({active} == 1)"


def _ended_at(timing: Timing) -> str:
    """Return the time of this evaluation for each rank that ended in good order in the last minute.

    A rank that trains again, under another address, has not ended.

    A rank stops serving once its end was read, so a scrape later the value is gone. An evaluation
    may never see it at an instant. A rank that ends by an exception exports 0 as well, and its
    reason.
    """
    minute = timing.duration(MINUTE)
    ended = f"last_over_time({select(training.RUN_ACTIVE)}[{minute}]) == 0"
    badly = f"last_over_time({select(training.RUN_END_INFO, _BAD_END)}[{minute}])"
    unless = "unless on (job, run, rank)"
    return f"time() + ({ended}) {unless} {badly} {unless} {select(training.RUN_ACTIVE)} == 1"


RANK_ACTIVE_TIME = recorded(
    training.RUN_ACTIVE,
    "active_timestamp_seconds",
    lambda timing: by("max", _active_at(), "rank", "instance"),
    "rank",
    "instance",
)
RUN_ACTIVE_TIME = recorded(
    training.RUN_ACTIVE,
    "active_timestamp_seconds",
    lambda timing: by("max", RANK_ACTIVE_TIME.select()),
)
RANK_ENDED_TIME = recorded(
    training.RUN_ACTIVE,
    "ended_timestamp_seconds",
    lambda timing: by("max", _ended_at(timing), "rank"),
    "rank",
)


_RANK_0_ACTIVE = recorded_name("run", training.RUN_ACTIVE, "rank_0_active_timestamp_seconds")


def _rank_0_active(timing: Timing) -> str:
    before = by("max", f"last_over_time({_RANK_0_ACTIVE}[{timing.hour}])")
    week = timing.seconds(7 * 24 * HOUR)
    return f"{by('max', _active_at(_RANK_0))}\nor {before} > time() - {week}"


# When rank 0 was last read as training. The rule repeats its own last value for a week: to read a
# week of samples at each evaluation would take a hundred times as long.
RANK_0_ACTIVE_TIME = recorded(
    training.RUN_ACTIVE, "rank_0_active_timestamp_seconds", _rank_0_active
)


def _unsaved_since(timing: Timing) -> str:
    now = by("max", _active_at(_RANK_0))
    started = by("max", _RANK_0_PROCESS)
    lately = f"last_over_time({_RANK_0_ACTIVE}[{timing.hour}]"
    # Of the evaluation before. If it is earlier than the start, it was of another process.
    before = by("max", f"{lately} offset {timing.evaluation})")
    pause = f"({now}\n- ({before}\n< {started})\nor 0 * {by('max', f'{lately})')})"
    # A clock may have been wrong: a time to come would stay, because no checkpoint is later.
    kept = f"({by('max', f'last_over_time({_UNSAVED_SINCE}[{timing.hour}])')} < time())"
    begun = f"{kept}\n+ {pause}"
    last = by("max", LAST_CHECKPOINT_IN_WEEK.select())
    return f"{last}\n> {begun}\nor {begun}\nor {started}\n> {last}\nor {last}"


# The time of the last checkpoint, later by all pauses between two processes of rank 0 since then.
# The time since this moment is how long the run has trained without a further checkpoint. The rule
# adds each pause to its own last value once, at the evaluation that first reads the new process. It
# reads that process itself: not every server has the results of a group while it evaluates it. Like
# RANK_0_ACTIVE_TIME, it repeats its value for a week after rank 0 was last read.
#
# The start of a process does not count, because a run that always fails before its next checkpoint
# would never be late. It does where there is no last value, such as for an exported run.
_UNSAVED_SINCE = recorded_name("run", training.LAST_CHECKPOINT_TIMESTAMP, "unsaved_since")
UNSAVED_SINCE = recorded(training.LAST_CHECKPOINT_TIMESTAMP, "unsaved_since", _unsaved_since)

# Memory.
ALLOCATED = 'state="allocated"'
PEAK_RATIO = recorded(
    memory.MEMORY_PEAK,
    "limit_ratio",
    lambda timing: (
        f"{by('max', select(memory.MEMORY_PEAK, ALLOCATED), 'rank', 'device')}\n"
        f"/ {by('min', select(memory.MEMORY_LIMIT), 'rank', 'device')}"
    ),
    "rank",
    "device",
)
HEADROOM_RATIO = recorded(
    memory.MEMORY_HEADROOM,
    "limit_ratio",
    lambda timing: (
        f"{by('min', select(memory.MEMORY_HEADROOM), 'rank', 'device')}\n"
        f"/ {by('min', select(memory.MEMORY_LIMIT), 'rank', 'device')}"
    ),
    "rank",
    "device",
)
OOM_RISK = aggregated(memory.OOM_RISK, "max", "rank", "device")


def on_address(operation: str, spec: MetricSpec, *matchers: str) -> str:
    """Return an aggregation over the ranks of a node that serve at the same address.

    The ranks of a container have its address. Several containers on a node have one each, and may
    have a limit of memory each. A label `instance` without a port, as with OTLP, is no address.
    """
    series = select(spec, *matchers)
    addressed = f'label_replace({series}, "address", "$1", "instance", "(.+):[0-9]+")'
    return by(operation, addressed, "node", "address")


# Several ranks of a run share the memory of their node, of which each knows only its own part.
ADDRESS_MEMORY_RATIO = (
    f"{on_address('sum', memory.MEMORY_BYTES, ON_HOST, ALLOCATED)}\n"
    f"/ {on_address('min', memory.MEMORY_LIMIT, ON_HOST)}"
)
NODE_MEMORY_RATIO = recorded(
    memory.MEMORY_BYTES,
    "limit_ratio",
    lambda timing: by("max", ADDRESS_MEMORY_RATIO, "node"),
    "node",
)


def _categories_of_fullest_rank() -> str:
    """Return the bytes by category of the rank that has most of all, on a GPU and on the host.

    Their sum is what that rank has. A sum of the maxima of several ranks may be on no rank.
    """

    def on(device: str) -> str:
        categories = select(memory.MEMORY_CATEGORY_BYTES, device)
        fullest = f"topk by (job, run) (1, {by('sum', categories, 'rank', 'device')})"
        return by("max", where(categories, fullest, "rank", "device"), "device", "category")

    return f"{on(ON_GPU)}\nor {on(ON_HOST)}"


MEMORY_CATEGORIES = recorded(
    memory.MEMORY_CATEGORY_BYTES,
    "max",
    lambda timing: _categories_of_fullest_rank(),
    "device",
    "category",
)
OFFLOAD_RATIO = training_share(memory.OFFLOAD_SECONDS, "direction")
OFFLOAD_BYTES_PER_STEP = per_step(memory.OFFLOAD_BYTES, "direction")
MEMORY_STATES = aggregated(memory.MEMORY_BYTES, "max", "device", "state")
MEMORY_PEAK = aggregated(memory.MEMORY_PEAK, "max", "device", "state")
MEMORY_LIMIT = aggregated(memory.MEMORY_LIMIT, "min", "device")
PHASE_PEAK = aggregated(memory.MEMORY_PHASE_PEAK, "max", "device", "phase")
BASELINE = aggregated(memory.MEMORY_BASELINE, "max", "device")
FRAGMENTATION = aggregated(memory.MEMORY_FRAGMENTATION, "max", "device")
PREDICTED_PEAK = aggregated(memory.MEMORY_PREDICTED_PEAK, "max", "device")
PREDICTION_ERROR = aggregated(memory.MEMORY_PREDICTION_ERROR, "max", "device")
LEAK = aggregated(memory.MEMORY_LEAK, "max", "device", "category")


def _replay_share(operation: str, *, long: bool) -> RecordingRule:
    """Return a rule for the share of rank 0's training time lost to replayed windows.

    Rank 0 is the only rank that exports the time lost to replays.
    """

    def expression(timing: Timing) -> str:
        time_range = timing.long if long else timing.short
        whole = rate(training.PHASE_SECONDS, time_range, TRAINING_PHASES, _RANK_0)
        return ratio(by("sum", rate(window.REPLAY_SECONDS, time_range)), by("sum", whole))

    return recorded(window.REPLAY_SECONDS, operation, expression)


# Accumulation windows of a TrainingRun.
MICRO_BATCH_SAMPLES = aggregated(window.MICRO_BATCH_SAMPLES, "max")
LARGEST_SHARE = aggregated(window.BATCH_SHARE, "max")
SMALLEST_SHARE = aggregated(window.BATCH_SHARE, "min")
EVEN_SHARE = aggregated(window.BATCH_SHARE, "avg")
COMPRESSION_ERROR = aggregated(window.COMPRESSION_ERROR, "max", "codec")
REPLAY_RATIO = _replay_share("ratio_rate5m", long=False)
REPLAY_RATIO_LONG = _replay_share("ratio_rate30m", long=True)


def _mean_utilization(*labels: str) -> RecordingRule:
    """Return a rule for the mean utilization of devices over five minutes, by `labels`.

    It is the share of busy seconds. Each rank adds them up every second; a scrape of the
    utilization itself sees one second of many.
    """

    def expression(timing: Timing) -> str:
        busy, whole = (
            by("sum", rate(devices.DEVICE_SECONDS, timing.short, *matchers), *labels)
            for matchers in (('state="busy"',), ())
        )
        return ratio(busy, whole, *labels)

    return recorded(devices.DEVICE_UTILIZATION, "avg5m", expression, *labels)


# Devices.
DEVICE_UTILIZATION = _mean_utilization("device")
DEVICE_UTILIZATION_BY_RANK = _mean_utilization("rank", "device")
POWER = aggregated(devices.DEVICE_POWER, "sum")
SM_ACTIVE = aggregated(devices.DEVICE_SM_ACTIVE, "avg", "device")
TEMPERATURE_BY_RANK = aggregated(devices.DEVICE_TEMPERATURE, "max", "rank", "device")
CLOCK = aggregated(devices.DEVICE_CLOCK, "min", "device")  # a throttled device is the slowest
LINK_BYTES_RATE = summed_rate(devices.DEVICE_LINK_BYTES, "link", "direction")

# The cost of monitoring. Seconds per second are already a ratio.
WATCH_RATIO_BY_RANK = summed_rate(overhead.WATCH_SECONDS, "rank")
WATCH_RATIO_BY_PART = recorded(
    overhead.WATCH_SECONDS,
    "avg_rate5m",
    lambda timing: by("avg", rate(overhead.WATCH_SECONDS, timing.short), "part"),
    "part",
)


def rate_since_start(operation: str, spec: MetricSpec, timing: Timing, *matchers: str) -> str:
    """Return the rate of a counter that steps increase, by run, over the short range.

    `rate` divides by the whole range, so it would rise slowly from 0 during the first five minutes
    of steps, or after Prometheus was down. The result is then the increase since the first scrape
    in the range, over the time since then, once a step has ended in that time. After a restart
    within the range, the time without steps counts.

    There is no result while no rank answers. Otherwise the last value of a run would be close to 0,
    because `rate` has results for five minutes after the end.

    Args:
        operation: The aggregation over ranks.
        spec: The counter. It has no labels of its own.
        timing: Scales the range.
        matchers: Label matchers of the ranks.
    """
    total, short = select(spec, *matchers), timing.short
    # The points of a subquery are all in memory at once, so it has one rank.
    of_rank_0 = select(spec, *matchers, _RANK_0)
    points = f"[{short}:{timing.duration(_LEAST_SCRAPE_SECONDS)}]"
    scraped = f"timestamp({of_rank_0})"
    if operation == "max":  # steps, of which all ranks have 0 before the first one
        increase = by("max", f"{of_rank_0} - min_over_time(({of_rank_0} > 0){points})")
        first = f"min_over_time(({scraped} and {of_rank_0} > 0){points})"
    else:
        increase = by(operation, f"{total} - min_over_time({total}[{short}])")
        first = f"min_over_time({scraped}{points})"
    covered = by("max", f"{scraped} - {first}")
    counts = f"count_over_time({total}[{short}])", f"count_over_time({of_rank_0}[{short}])"
    has_gap = f"{by('max', counts[0])} > {by('max', counts[1])} + 1"  # rank 0 did not answer
    is_start = (
        f"({covered} < {timing.seconds(0.9 * SHORT_SECONDS)}\n"
        f"unless on (job, run) {by('max', f'resets({total}[{short}])')} > 0\n"
        f"unless on (job, run) {has_gap})"
    )
    rates = by(operation, rate(spec, short, *matchers))
    return where(f"(\n{increase} / {is_start} > 0\nor {rates}\n)", total)


def _samples_rate(timing: Timing) -> str:
    """Return the samples per second of all ranks.

    There is no result for a run whose ranks share samples: the sum would be too large.
    """
    shared = select(training.SHARED_WORK, 'of="samples"')
    return (
        f"{rate_since_start('sum', training.SAMPLES, timing)}\n"
        f"unless on (job, run) last_over_time({shared}[{timing.short}])"
    )


def _state_of_run(timing: Timing) -> str:
    """Return the state of each run with a rank that answers; the first state that applies.

    An end counts for a minute, because a rank stops serving once it was read: see `_ended_at`.
    """
    minute = timing.duration(MINUTE)
    active = f"{by('max', select(training.RUN_ACTIVE))} == 1"
    silence = f"time() - {by('max', select(training.LAST_ACTIVITY_TIMESTAMP))}"
    while_active = (
        (RunStatus.HANGING, f"{by('max', select(comm.HANG_ACTIVE))} == 1"),
        (RunStatus.STALLED, f"{silence} > {STALLED_SECONDS:.0f}"),
        (RunStatus.STARTING, f"{by('max', select(training.STEPS))} == 0"),
    )
    at_its_end = [
        f"{state:d} * {by('max', f'last_over_time({ended}[{minute}])')}"
        for reason, state in reversed(STATE_BY_REASON.items())
        for ended in (select(training.RUN_END_INFO, f'reason="{reason}"'),)
    ]
    states = [where(f"{state:d} * ({applies}) ^ 0", active) for state, applies in while_active]
    over = f"last_over_time({select(training.RUN_ACTIVE)}[{minute}]) == 0"
    ended = f"{RunStatus.ENDED:d} + {by('max', over)}"
    return "\nor on (job, run) ".join((*states, active, *at_its_end, ended))


def _step_quantile(operation: str, aggregation: str, parameter: str = "") -> RecordingRule:
    """Return a rule that aggregates the quantiles of step durations over ranks."""
    quantiles = parameter + select(training.STEP_DURATION_QUANTILE)
    return recorded(
        training.STEP_DURATION_QUANTILE,
        operation,
        lambda timing: by(aggregation, quantiles, "quantile"),
        "quantile",
    )


# Runs as a whole, for dashboards.
STALLED_SECONDS = 300.0  # without progress
_LEAST_SCRAPE_SECONDS = 5.0  # a shorter interval between scrapes is not usual
RUN_STATE = recorded(training.RUN_ACTIVE, "state", _state_of_run)
RUN_START = aggregated(training.RUN_START_TIMESTAMP, "min")
RUN_ATTEMPT = aggregated(training.RUN_ATTEMPT, "max")
WORLD_SIZE = aggregated(training.WORLD_SIZE, "max")
STEPS_DONE = aggregated(training.STEPS, "max")
LAST_STEP = aggregated(training.LAST_STEP, "max")
SAMPLES_RATE = recorded(training.SAMPLES, "rate5m", _samples_rate)
GOODPUT = recorded(
    training.PRODUCTIVE_SECONDS,
    "start_ratio",
    lambda timing: (
        f"{by('max', select(training.PRODUCTIVE_SECONDS))}\n"
        f"/ (time() - {by('min', select(training.RUN_START_TIMESTAMP))})\n"
        # The counter knows its own attempt only, and the time is that of all attempts.
        f"and on (job, run) {by('max', select(training.RUN_ATTEMPT))} == 0"
    ),
)
STEP_QUANTILE_MIN = _step_quantile("min", "min")
STEP_QUANTILE_MEDIAN = _step_quantile("median", "quantile", "0.5, ")
STEP_QUANTILE_MAX = _step_quantile("max", "max")

GROUPS: dict[str, tuple[RecordingRule, ...]] = {
    "zerowatch-thresholds": (ALERT_THRESHOLD,),
    "zerowatch-communication": (
        EXPOSED_RATIO,
        EXPOSED_RATIO_LONG,
        EXPOSED_RATIO_USUAL,
        EXPOSED_RATIO_BY_RANK,
        EXPOSED_RATIO_BY_GROUP,
        COMM_RATIO,
        CAUSE_RATIO,
        COVERAGE,
        WAIT_RATIO_BY_RANK,
        WAIT_SHORTFALL,
        CALLS_PER_STEP,
        COLLECTIVE_BUCKETS,
        LINK_SECOND_LOWEST,
        LINK_BANDWIDTH_USUAL,
        LINK_BANDWIDTH_RATIO,
        BUS_BANDWIDTH,
        VOLUME_RATIO,
        STEP_WIRE_BYTES,
        STRAGGLER_SCORE,
        WIRE_BYTES_PER_STEP,
        PAYLOAD_BYTES_PER_STEP,
        LINK_BANDWIDTH,
        LINK_BEST_BANDWIDTH,
        LINK_LATENCY,
        HEARTBEAT_AGE,
        EXCHANGE_FAILURES_RATE,
    ),
    "zerowatch-training": (
        STEPS_RATE,
        MFU,
        MFU_USUAL,
        LOSS,
        LOSS_MEDIAN,
        LOSS_DEVIATION,
        LOSS_SPIKE,
        GRADIENT_NORM,
        GRADIENT_NORM_MEDIAN,
        GRADIENT_NORM_RATIO,
        ACTIVE_RANKS,
        STEP_BUCKETS,
        STEP_DURATION,
        STEP_DURATION_BY_RANK,
        PHASE_SECONDS_PER_STEP,
        PHASE_RATIO,
        DATA_RATIO_BY_RANK,
        GENERATION_SPEED,
        GENERATION_WAIT,
        GENERATED_LENGTH,
        GATHERS_OF_GENERATION,
        SKIPPED_RATIO,
        LAST_CHECKPOINT,
        CHECKPOINT_INTERVAL,
        LAST_CHECKPOINT_HOURLY,
        CHECKPOINT_INTERVAL_HOURLY,
        LAST_CHECKPOINT_IN_WEEK,
        CHECKPOINT_INTERVAL_IN_WEEK,
        RANK_ACTIVE_TIME,
        RUN_ACTIVE_TIME,
        RANK_ENDED_TIME,
        RANK_0_ACTIVE_TIME,
        UNSAVED_SINCE,
    ),
    "zerowatch-memory": (
        PEAK_RATIO,
        HEADROOM_RATIO,
        OOM_RISK,
        NODE_MEMORY_RATIO,
        MEMORY_CATEGORIES,
        OFFLOAD_RATIO,
        OFFLOAD_BYTES_PER_STEP,
        MEMORY_STATES,
        MEMORY_PEAK,
        MEMORY_LIMIT,
        PHASE_PEAK,
        BASELINE,
        FRAGMENTATION,
        PREDICTED_PEAK,
        PREDICTION_ERROR,
        LEAK,
    ),
    "zerowatch-window": (
        MICRO_BATCH_SAMPLES,
        LARGEST_SHARE,
        SMALLEST_SHARE,
        EVEN_SHARE,
        COMPRESSION_ERROR,
        REPLAY_RATIO,
        REPLAY_RATIO_LONG,
    ),
    "zerowatch-devices": (
        DEVICE_UTILIZATION,
        DEVICE_UTILIZATION_BY_RANK,
        POWER,
        SM_ACTIVE,
        TEMPERATURE_BY_RANK,
        CLOCK,
        LINK_BYTES_RATE,
    ),
    "zerowatch-runs": (
        RUN_STATE,
        RUN_START,
        RUN_ATTEMPT,
        WORLD_SIZE,
        STEPS_DONE,
        LAST_STEP,
        SAMPLES_RATE,
        GOODPUT,
        STEP_QUANTILE_MIN,
        STEP_QUANTILE_MEDIAN,
        STEP_QUANTILE_MAX,
    ),
    "zerowatch-overhead": (
        WATCH_RATIO_BY_RANK,
        WATCH_RATIO_BY_PART,
    ),
}
