"""The dashboard Overview: state, alerts, bottlenecks, progress and slowest ranks of a run."""

from __future__ import annotations

from dataclasses import dataclass

from ...metrics.catalog import training as steps
from ...metrics.thresholds import (
    DATA_RATIO_HIGH,
    DEVICE_UTILIZATION_LOW,
    EXPOSED_COMM_RATIO_HIGH,
    OOM_RISK_CRITICAL,
    OOM_RISK_HIGH,
    REPLAY_RATIO_HIGH,
    STRAGGLER_SCORE_HIGH,
    Threshold,
)
from .. import recording_rules as recorded
from ..alerts.communication import steady
from ..grafana.dashboard import Dashboard, Row, uid_of
from ..grafana.links import PAGE
from ..grafana.panels import (
    ANY_IS_BAD,
    BYTES,
    COUNT,
    DAYS_AND_HOURS,
    NEUTRAL,
    PLAIN,
    PLAIN_TEXT,
    RATIO,
    SECONDS,
    Column,
    Query,
    Stat,
    Table,
    Text,
    TimeSeries,
    above,
)
from ..limits import selected
from ..promql import ON_GPU, by, where
from ..timing import Timing
from .across_ranks import SPREAD
from .queries import (
    RANK,
    RUN,
    last_known,
    latest,
    limit,
    of_first_rank,
    of_run,
    state_of,
    worst,
)
from .shared_panels import (
    NOT_KNOWN,
    PHASE_COLORS,
    RANK_LEGEND,
    SAMPLES_SHARED,
    STATES,
    TABLE_ROWS,
    alert_table,
    rank_table,
    sized,
    step_seconds,
)

FIRING = f'ALERTS{{{", ".join(RUN)}, alertstate="firing"}}'
ON_A_GPU = of_run(recorded.DEVICE_UTILIZATION, ON_GPU)
LATE = "typical steps"
# The time since the last step of a run that has not ended, in seconds.
SINCE_LAST_STEP = where(
    f"time() - {by('max', of_run(steps.LAST_STEP_TIMESTAMP))}",
    f"{by('max', of_run(steps.RUN_ACTIVE))} == 1",
)
TYPICAL_STEP = by("max", of_run(recorded.STEP_QUANTILE_MEDIAN, 'quantile="0.5"'))

HEALTH = (
    *sized(
        4,
        5,
        Stat(
            title="State",
            description="**training**, **starting** (no step yet), **stalled** (no progress for "
            "five minutes) or **hanging** (a rank reports that it hangs). After the end: "
            "**completed**, or why the run ended. **vanished**: the ranks were training and no "
            "longer answer, without a word on why; see the end of their logs.",
            queries=(Query(state_of(*RUN), "state", shape="now"),),
            unit=PLAIN,
            named=STATES,
            color="background",
            plain=True,
        ),
        Stat(
            title="Alerts firing",
            description="Number of alerts of this run that fire now. It should be 0. The table of "
            "alerts below names them, and each alert links to its page in the runbook.",
            queries=(Query(f"count({FIRING}) or vector(0)", "alerts", shape="now"),),
            unit=PLAIN,
            thresholds=ANY_IS_BAD,
            color="background",
            plain=True,
        ),
        Stat(
            title="Ranks",
            description="Number of ranks that train now, and of those that are missing from the "
            "number with which the run was started. If ranks are missing, the alerts below name "
            "them and their nodes.",
            queries=(
                # vector(0): a killed run exports nothing, and the panel should then show 0.
                Query(
                    f"sum({of_run(recorded.ACTIVE_RANKS)}) or vector(0)", "training", shape="now"
                ),
                Query(
                    f"{of_run(recorded.WORLD_SIZE)}\n"
                    f"- on (job, run) {of_run(recorded.ACTIVE_RANKS)}",
                    "missing",
                    shape="now",
                ),
            ),
            unit=PLAIN,
            thresholds=ANY_IS_BAD,
            colors={"training": NEUTRAL},
            plain=True,
        ),
        Stat(
            title="Time since the last step",
            description="Time since any rank completed a step, in seconds and as a number of "
            "typical steps. During training it is at most about one step. It is red from ten "
            "typical steps on: read hang-rank-*.txt in the run folder, which shows which rank "
            "waits for which. Evaluations and checkpoints take their time too.",
            queries=(
                Query(SINCE_LAST_STEP, "since", shape="now"),
                Query(f"({SINCE_LAST_STEP})\n/ on (job, run) {TYPICAL_STEP}", LATE, shape="now"),
            ),
            unit=SECONDS,
            units={LATE: COUNT},
            colors={"since": NEUTRAL},
            decimals=1,
            thresholds=above(10),
            plain=True,
            empty="no step yet, or the run is over",
        ),
        Stat(
            title="Step",
            description="Number of optimizer steps since the run was started or resumed, and the "
            "number of earlier attempts of the run.",
            queries=(
                Query(of_run(recorded.STEPS_DONE), "steps", shape="now"),
                Query(of_run(recorded.RUN_ATTEMPT), "earlier attempts", shape="now"),
            ),
            unit=PLAIN,
            thresholds=PLAIN_TEXT,
            plain=True,
        ),
        Stat(
            title="Last checkpoint",
            description="Time since the last checkpoint of the run, also of an earlier attempt: "
            "what a failure now would cost. See the alert ZerowatchCheckpointOverdue.",
            queries=(
                Query(
                    f"time() - {latest(recorded.LAST_CHECKPOINT_IN_WEEK, *RUN)}",
                    "ago",
                    shape="now",
                ),
            ),
            unit=DAYS_AND_HOURS,
            thresholds=PLAIN_TEXT,
            plain=True,
            empty="none known",
        ),
    ),
    alert_table(width=24, height=6),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bottleneck:
    """A measurement that an alert compares with a threshold.

    Attributes:
        name: What may limit the run.
        of: The whole of which the value is a share.
        page: The dashboard with details.
        value: PromQL of the value, by job and run.
        limit: The threshold of the alert.
        is_idle: Whether the limit is a lower limit of the share that remains.
    """

    name: str
    of: str
    page: str
    value: str
    limit: Threshold
    is_idle: bool = False

    def threshold(self) -> str:
        """Return the upper limit of the value."""
        value = by("max", selected(self.limit, *RUN))
        return f"1 - {value}" if self.is_idle else value

    def labeled(self, expression: str, **more: str) -> str:
        """Return `expression`, with the name of this bottleneck and `more` as labels."""
        for label, text in {"name": self.name, **more}.items():
            expression = f'label_replace({expression}, "{label}", "{text}", "", "")'
        return expression


BOTTLENECKS = (
    Bottleneck(
        name="waiting for communication",
        of="of training time",
        page="communication",
        value=by("max", of_run(recorded.EXPOSED_RATIO)),
        limit=EXPOSED_COMM_RATIO_HIGH,
    ),
    Bottleneck(
        name="slowest rank",
        of="of a step behind",
        page="communication",
        # The phases of ranks are not compared everywhere; see the alert.
        value=by("max", steady(of_run(recorded.STRAGGLER_SCORE), Timing()))
        + "\nor on (job, run) "
        + by("max", steady(of_run(recorded.WAIT_SHORTFALL), Timing())),
        limit=STRAGGLER_SCORE_HIGH,
    ),
    Bottleneck(
        name="waiting for data",
        of="of training time",
        page="step-anatomy",
        value=by("max", of_run(recorded.DATA_RATIO_BY_RANK)),
        limit=DATA_RATIO_HIGH,
    ),
    Bottleneck(
        name="idle GPUs",
        of="of time",
        page="devices",
        value=f"1 - {by('min', ON_A_GPU)}",
        limit=DEVICE_UTILIZATION_LOW,
        is_idle=True,
    ),
    Bottleneck(
        name="out of memory",
        of="probability in 50 steps",
        page="memory",
        value=by("max", of_run(recorded.OOM_RISK)),
        limit=OOM_RISK_HIGH,
    ),
    Bottleneck(
        name="replayed windows",
        of="of training time",
        page="memory",
        value=by("max", of_run(recorded.REPLAY_RATIO)),
        limit=REPLAY_RATIO_HIGH,
    ),
)
_OR = "\nor on (job, run, name) "
VALUES = _OR.join(each.labeled(each.value, of=each.of, page=each.page) for each in BOTTLENECKS)
LIMITS = _OR.join(each.labeled(each.threshold()) for each in BOTTLENECKS)

LIMITED_BY = (
    Table(
        title="Bottlenecks",
        description="What limits the run, the worst first: each measurement, the threshold of its "
        "alert, and the measurement as a share of the threshold. From 100% on it is a problem. "
        "Begin with the first row; the link in the last column leads to the dashboard with "
        "details.",
        labels={"name": "What", "of": "Of", PAGE: "See"},
        columns=(
            Column(title="Now", expression=VALUES, unit=RATIO, decimals=1),
            Column(
                title="Limit",
                expression=f"({LIMITS})\n+ on (job, run, name) group_right () 0 * ({VALUES})",
                unit=RATIO,
                decimals=0,
            ),
            Column(
                title="Of the limit",
                expression=f"({VALUES})\n/ on (job, run, name) group_left () ({LIMITS})",
                unit=RATIO,
                decimals=0,
                thresholds=above(0.75, 1),
                bar_until=1.5,
            ),
        ),
        after=("Of", "See"),
        sort_by="Of the limit",
        widths={"What": 190, "Now": 75, "Limit": 65, "Of": 180, "See": 120},
        width=12,
        height=9,
    ),
    TimeSeries(
        title="Step time by phase",
        description="Seconds of a step in each phase, as a mean over ranks. Begin with the widest "
        "band. Communication is part of the phases, mostly of backward and optimizer.",
        queries=(Query(of_run(recorded.PHASE_SECONDS_PER_STEP), "{{phase}}"),),
        unit=SECONDS,
        minimum=0,
        stacked=True,
        colors=PHASE_COLORS,
        width=12,
        height=9,
        dashboard=uid_of("step_anatomy"),
    ),
)

PROGRESS = sized(
    8,
    9,
    step_seconds(),
    TimeSeries(
        title="Throughput",
        description="Samples per second of all ranks together, as a mean over five minutes. If it "
        "falls although the work is the same, the panels above show the reason. It is not known if "
        "ranks share samples, as with tensor, sequence and pipeline parallelism.",
        queries=(Query(of_run(recorded.SAMPLES_RATE), "samples/s"),),
        unit=COUNT,
        minimum=0,
        empty=SAMPLES_SHARED,
        dashboard=uid_of("step_anatomy"),
    ),
    TimeSeries(
        title="Loss",
        description="Mean loss over ranks. Marks below the graph show when the tuner changed "
        "something or an alert fired. If it is NaN or Inf, see the alert ZerowatchLossNotFinite.",
        queries=(Query(of_run(recorded.LOSS), "loss"),),
        unit=PLAIN,
    ),
    TimeSeries(
        title="Exposed communication",
        description="Share of training time in which training only waits for communication. If it "
        "is above the line, reduce it first: the dashboard Communication shows the cause.",
        queries=(
            Query(of_run(recorded.EXPOSED_RATIO), "5 minutes"),
            Query(of_run(recorded.EXPOSED_RATIO_LONG), "30 minutes"),
            limit(EXPOSED_COMM_RATIO_HIGH),
        ),
        unit=RATIO,
        minimum=0,
        dashboard=uid_of("communication"),
    ),
    TimeSeries(
        title="Devices busy",
        description="Share of time in which the devices work: the mean over ranks and the least "
        "busy rank. Below the line, a GPU waits for communication or data, or needs larger "
        "batches. Without GPUs there is no line: the value is then a share of all cores, which "
        "the ranks of a host divide among them.",
        queries=(
            Query(by("avg", of_run(recorded.DEVICE_UTILIZATION_BY_RANK)), "mean"),
            Query(by("min", of_run(recorded.DEVICE_UTILIZATION_BY_RANK)), "least busy"),
            limit(DEVICE_UTILIZATION_LOW, only_if=ON_A_GPU),
        ),
        unit=RATIO,
        minimum=0,
        maximum=1,
        dashboard=uid_of("devices"),
    ),
    TimeSeries(
        title="Risk of running out of memory",
        description="Probability of an out-of-memory error within the next 50 steps, for the "
        f"ranks most at risk. From {OOM_RISK_HIGH:.0%} on, lower the micro-batch or use a "
        "higher ZeRO stage. The dashboard Memory shows what fills memory.",
        queries=(
            Query(
                worst(recorded.OOM_RISK, also="device", among=of_run),
                f"{RANK_LEGEND} {{{{device}}}}",
            ),
            limit(OOM_RISK_HIGH),
        ),
        unit=RATIO,
        minimum=0,
        maximum=1,
        dashboard=uid_of("memory"),
    ),
)

# A rank delays the others by the time that it is slower than the median rank. Where ranks have no
# such score, the rank that waits least is the one for which the others wait.
BEHIND = (
    f"({by('max', of_run(recorded.STRAGGLER_SCORE), *RANK)})\n"
    f"or on (job, run, rank, node) {by('max', of_run(recorded.WAIT_SHORTFALL), *RANK)}"
)

RANKS_OF_RUN = (
    rank_table(
        title=f"The {TABLE_ROWS} ranks that delay the others",
        description="**Behind** is the time by which a rank is slower than the median rank, as a "
        "share of a step. For a rank without this score it is the share of training time by which "
        "it waits less than the median rank, if zerowatch records all collectives: the others wait "
        "for the rank that does not wait. Check its node, its device and its data.",
        columns=(
            Column(
                title="Behind",
                expression=BEHIND,
                unit=RATIO,
                thresholds=above(STRAGGLER_SCORE_HIGH),
                decimals=1,
            ),
            Column(
                title="Step time",
                expression=by("max", of_run(recorded.STEP_DURATION_BY_RANK), *RANK),
                unit=SECONDS,
            ),
            Column(
                title="Exposed",
                expression=by("max", of_run(recorded.EXPOSED_RATIO_BY_RANK), *RANK),
                unit=RATIO,
                thresholds=above(EXPOSED_COMM_RATIO_HIGH),
                decimals=1,
            ),
            Column(
                title="Busy",
                expression=by("max", of_run(recorded.DEVICE_UTILIZATION_BY_RANK), *RANK),
                unit=RATIO,
                decimals=0,
            ),
            Column(
                title="Memory risk",
                expression=by("max", of_run(recorded.OOM_RISK), *RANK),
                unit=RATIO,
                thresholds=above(OOM_RISK_HIGH, OOM_RISK_CRITICAL),
                decimals=0,
            ),
        ),
        width=14,
        height=9,
    ),
    Text(
        title="How to read these dashboards",
        description="Notes on all dashboards.",
        content="Figures about a whole run are means of the last five minutes. A graph of many "
        "ranks shows those that were worst in the selected time; choose nodes and ranks at the top "
        "of the other dashboards to see others. Panels that the choice does not change are marked "
        "**all ranks**. Each panel's **(i)** explains how to read it and what to do. Dashed lines "
        "are thresholds of alerts. Click a series or a cell: it leads to the rank, its node, its "
        "traces or the runbook. Marks below a graph are alerts, decisions of the tuner and starts "
        "of runs. Rows with details are collapsed; a click on a heading opens them.",
        width=10,
        height=9,
    ),
)

GOODPUT = sized(
    6,
    6,
    Stat(
        title="Goodput",
        description="Share of the time since the run began that was spent on steps that count: "
        "without skipped updates, discarded attempts, evaluation, checkpoints and time before "
        "the first step. It is not known for a run that was restarted.",
        queries=(Query(of_run(recorded.GOODPUT), "goodput"),),
        unit=RATIO,
        empty=NOT_KNOWN,
        decimals=1,
        thresholds=PLAIN_TEXT,
    ),
    Stat(
        title="Model FLOPs utilization",
        description="Floating point operations that the model needs, divided by the peak of "
        "the device, as a mean over ranks. The dashboard Step anatomy shows where the rest of "
        "the time goes.",
        queries=(Query(of_run(recorded.MFU), "MFU"),),
        unit=RATIO,
        decimals=1,
        thresholds=PLAIN_TEXT,
        empty=NOT_KNOWN,
    ),
    Stat(
        title="Checkpoints",
        description="Checkpoints since the start, by outcome. A failed one leaves the run with "
        "an older checkpoint: see the log, and the alert ZerowatchCheckpointFailed.",
        queries=(
            Query(last_known(of_run(steps.CHECKPOINTS), "outcome"), "{{outcome}}", shape="now"),
        ),
        unit=PLAIN,
        thresholds=ANY_IS_BAD,
        colors={"saved": NEUTRAL},
        plain=True,
        empty=NOT_KNOWN,
    ),
    Stat(
        title="Cost of checkpoints",
        description="Time in which training stopped for checkpoints since the start, and bytes "
        "of the files of the last one, if a TrainingRun saved it.",
        queries=(
            Query(last_known(of_first_rank(steps.LAST_CHECKPOINT_BYTES)), "size", shape="now"),
            Query(last_known(of_run(steps.CHECKPOINT_SECONDS)), "time", shape="now"),
        ),
        unit=BYTES,
        units={"time": SECONDS},
        thresholds=PLAIN_TEXT,
        plain=True,
        empty=NOT_KNOWN,
    ),
)

DASHBOARD = Dashboard(
    name="overview",
    title="Overview",
    description="Is the run healthy, and what limits it?",
    rows=(
        Row("Is the run healthy?", HEALTH),
        Row("What limits it?", LIMITED_BY),
        Row("Progress", PROGRESS),
        Row("Ranks", RANKS_OF_RUN),
        Row("Goodput and checkpoints", GOODPUT),
        Row("Spread over all ranks", SPREAD, collapsed=True),
    ),
    traces=('{ name = "train.step" && .zerowatch.run = "$run" }',),
)
