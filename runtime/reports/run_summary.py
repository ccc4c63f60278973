"""Computes the figures of a recorded run: verdict, time, communication, memory, devices, ranks.

All figures come from the step logs and metrics logs in the run folder. A figure that was not
recorded is None. Reports, comparisons, the console and notebooks show the same summary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time as unix_seconds
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...metrics.catalog import (
    across_ranks,
    communication,
    devices,
    memory,
    overhead,
    training,
    tuner,
    window,
)
from ...metrics.catalog.labels import CAUSE, NON_TRAINING_PHASES, WORK_SHARED_BY
from ...metrics.catalog.spec import MetricSpec
from ...metrics.metrics_log_reader import SeriesKey
from ...metrics.thresholds import (
    COMM_COVERAGE_LOW,
    DATA_RATIO_HIGH,
    DEVICE_UTILIZATION_LOW,
    EXPOSED_COMM_RATIO_HIGH,
    LINK_BANDWIDTH_LOW,
    MEMORY_HEADROOM_IDLE,
    MEMORY_HEADROOM_LOW,
    NVLINK_CRC_ERRORS_HIGH,
    OOM_RISK_HIGH,
    PCIE_REPLAYS_HIGH,
    SKIPPED_RATIO_HIGH,
    STRAGGLER_SCORE_HIGH,
    THRESHOLDS,
    THROTTLED_RATIO_HIGH,
    WATCH_RATIO_HIGH,
    Severity,
    Threshold,
)
from ...metrics.xid_errors import DRAIN_XIDS, describe
from ..common.exit_notes import AFTER_FIRST, FAILED, FIRST_TO_FAIL
from ..common.format_numbers import format_bytes, format_duration
from ..common.plain_text import printable
from ..common.report_files import times_in
from ..common.run_lock import is_locked
from .metrics_reader import RankMetrics, RecordedMetrics, read_metrics
from .run_reader import (
    LAST_STEPS,
    LONGEST_GAP,
    MAX_LAG_SECONDS,
    Column,
    RankSteps,
    RecordedRun,
    ReportFile,
    has_tenth_step,
    number_ranges,
    read_run,
)

# Raise it if an older reader of `zerowatch report --json` would misunderstand a change.
SCHEMA_VERSION = 1
Status = Literal[
    "completed", "interrupted", "out_of_memory", "exception", "peer_failed", "hang", "killed",
    "running", "unknown",
]  # fmt: skip

# The metrics that a summary reads over time; of the others it reads the last values only.
SUMMARY_SERIES = frozenset({communication.STRAGGLER_SCORE.name})
# From then on the verdict on an active run says how long ago its last step ended.
SILENT_SECONDS = 300.0
MAX_RANGES = 8  # of ranks in a sentence; more are counted
# A 99th percentile above this multiple of the median means that single steps stall.
STALL_FACTOR = 1.5
# From this multiple of the interval of metrics on, a rank has trained on without them.
EARLY_END_INTERVALS = 3
# A rank that was killed has no collectives and no memory of its last second; this leaves room.
UNRECORDED_SECONDS = 5.0
_NO_METRICS = (
    "Its monitoring process had ended (process.separate; the log of the script says why), the "
    "metrics could not be written, or, in a script without DeepSpeed, it was killed while the "
    "steps waited for the next read of the Flight Recorder"
)
OTHER_RATIO_HIGH = 0.5
STEPS_OF_A_HUNDREDTH = 100  # fewer steps have no slowest hundredth
MIN_STEPS_FOR_QUANTILES = 20
CHECKPOINT_RATIO_HIGH = 0.10
_COMPUTE = ("forward", "backward", "optimizer")
_WITHOUT_DEEPSPEED = "none"  # in place of a ZeRO stage
# Headlines of out-of-memory reports about the memory that a data loader's workers share.
_HOST_MEMORY = re.compile(
    r"out of memory on cpu\b|\(in DataLoader worker|killed by the kernel's OOM killer"
)
_CAUSE_TEXTS = {
    "imbalance": "another rank was late",
    "latency": "each call has a fixed cost",
    "redundancy": "more was sent than the ZeRO stage needs",
    "bandwidth": "the link was busy",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A problem of the run, with its evidence and what to do.

    Attributes:
        severity: "critical" if it ended the run or makes its result wrong.
        name: Short name, such as "exposed_comm".
        sentence: What was found, with figures.
        advice: What to do next.
        cost_ratio: Share of training time that it costs; 0 if that is not known.
    """

    severity: Severity
    name: str
    sentence: str
    advice: str
    cost_ratio: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the run is. Times are Unix seconds.

    Attributes:
        world_size: Number of ranks; of the last attempt. None if it is not recorded.
        hosts: Those of the last attempt.
        started: Start of the first attempt, or of the first recorded step.
        ended: End of the last recorded step.
        attempts: Attempts, restarts included.
        info: Versions, backend, accelerator and ZeRO stage, as in the metric run_info; empty if no
            metrics log was written.
    """

    world_size: int | None
    hosts: tuple[str, ...]
    started: float | None
    ended: float | None
    attempts: int
    info: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShare:
    """A part of the time of all ranks.

    Attributes:
        name: Phase or cause.
        seconds: Mean per rank over the whole run.
        seconds_per_step: Mean over ranks and steps.
        ratio: Share of training time, which is without evaluation and checkpoints; of these two
            themselves, the share of wall time.
    """

    name: str
    seconds: float
    seconds_per_step: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveShare:
    """A collective operation over all recorded steps.

    Attributes:
        calls_per_step: Calls of a rank in a step.
        payload_bytes_per_step: Payload of a rank in a step.
        wire_bytes_per_step: Bytes that a rank sends in a step.
        seconds_per_step: From issue to completion, summed over calls; None if not timed.
        bandwidth: Wire bytes over transfer time of the last calls, in bytes per second, the lowest
            of all ranks; None if not recorded.
    """

    op: str
    calls_per_step: float
    payload_bytes_per_step: float
    wire_bytes_per_step: float
    seconds_per_step: float | None
    bandwidth: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of a device of a rank; `RunSummary.memory` has the fullest of each kind.

    Attributes:
        device: The device, such as "cuda:0".
        rank: That rank.
        peak_bytes: Highest recorded use.
        limit_bytes: Limit at the end; None if unknown.
        headroom_bytes: Limit less the predicted next peak, at the end; None if not recorded.
        risk_ratio: Last probability that a peak of the next 50 steps exceeds the limit.
        highest_risk_ratio: The highest recorded one.
        categories: Bytes at a step's peak by category, and the baseline; empty if not recorded.
        leak_bytes_per_step: Unexplained growth by category; empty if none was found.
    """

    device: str
    rank: int
    peak_bytes: float | None
    limit_bytes: float | None
    headroom_bytes: float | None
    risk_ratio: float | None
    highest_risk_ratio: float | None
    categories: Mapping[str, float]
    leak_bytes_per_step: Mapping[str, float]

    @property
    def kind(self) -> str:
        """The kind of the device, such as "cuda"."""
        return self.device.split(":")[0]

    @property
    def headroom_ratio(self) -> float | None:
        """Free share of the limit at the predicted next peak."""
        return _ratio(self.headroom_bytes, self.limit_bytes)

    @property
    def peak_ratio(self) -> float | None:
        """Highest use as a share of the limit."""
        return _ratio(self.peak_bytes, self.limit_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """Readings of a kind of device over all ranks that have it.

    Attributes:
        device: The device, such as "cuda".
        readings: Minimum, mean and maximum of each reading over ranks and time; the unit is at the
            end of its name.
        events: Throttled seconds, ECC, link and XID errors over the run and all devices, by name;
            only those above 0. Seconds at the power cap are left out: they are usual at full load.
    """

    device: str
    readings: Mapping[str, tuple[float, float, float]]
    events: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """Figures of one rank; None where nothing was recorded. Ratios are of training time.

    Attributes:
        straggler_phase: Phase in which it is slowest against the median rank.
        straggler_score: By what share of a step, at the end.
        wait_ratio: Waiting for later ranks in collectives, overlapped or not.
    """

    rank: int
    host: str
    steps: int
    last_step: int
    step_seconds: float
    exposed_ratio: float | None
    wait_ratio: float | None
    data_ratio: float
    memory_peak_ratio: float | None
    oom_risk_ratio: float | None
    utilization_ratio: float | None
    mfu_ratio: float | None
    straggler_phase: str | None
    straggler_score: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerDecision:
    """A decision of the tuner, with its proof.

    Attributes:
        change: The knobs with their values before and after.
        verdict: Such as "accepted" or "advised".
        symptom: What it was meant to improve.
        gain: Measured gain of throughput, 0.5 for half as much again.
        lower: Lower bound of the gain.
        upper: Upper bound of the gain.
        predicted_gain: Predicted gain.
        pairs: Compared pairs of blocks of steps, without and with the change.
        steps: Steps of the trial.
        exploration_seconds: Training time that it cost.
    """

    number: int
    step: int
    change: str
    verdict: str
    symptom: str
    reason: str
    numerics: str
    gain: float | None
    lower: float | None
    upper: float | None
    predicted_gain: float | None
    pairs: int
    steps: int
    exploration_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerSummary:
    """What the tuner did.

    Attributes:
        mode: "off", "advise" or "auto"; None if it is unknown.
        state: Its last state; None if not recorded.
        symptoms: Symptoms of the last diagnosis above 0; None if not recorded.
        discarded_observations: Observations without a diagnosis, because step times changed.
        decisions: Decisions and advice, oldest first.
    """

    mode: str | None
    state: str | None
    symptoms: Mapping[str, float] | None
    decisions: tuple[TunerDecision, ...]
    discarded_observations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitoringCost:
    """What monitoring cost, over all ranks with a metrics log.

    Attributes:
        ratio: Share of the ranks' time; None if not recorded.
        seconds: Seconds of each part per rank.
        dropped: Records lost by part; only those above 0.
        hook_failures: Failures by hook; only those above 0.
    """

    ratio: float | None
    seconds: Mapping[str, float]
    dropped: Mapping[str, float]
    hook_failures: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A report file in the run folder.

    Attributes:
        kind: "out_of_memory", "leak", "hang" or "exit".
        path: Path below the run folder.
        text: The whole report; at most 64 KiB.
    """

    kind: str
    path: str
    rank: int | None
    headline: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The figures of a run.

    Attributes:
        folder: The run folder, as it was given.
        status: How the run ended, as far as the folder shows it.
        verdict: The most important finding, in one sentence.
        findings: All findings, the most important first.
        figures: Numbers by name, as in `FIGURES`; None if not recorded.
        phases: Phases of training, then evaluation and checkpoints.
        is_upper_bound: Whether `comm_ratio` is only an upper bound, as on a GPU.
        causes: Exposed communication by cause; "unknown" is the rest. Empty if not recorded.
        collectives: Collectives by operation, most wire bytes first.
        problems: What is missing, damaged or not recorded.
        notes: What to know about the figures, one sentence each.
        straggler_threshold: Score above which a rank is a straggler, as the run has set it.

    Examples:
        >>> summary = summary_of(Path("runs/20261123T005552-c44904"))
        >>> summary.figures["comm_exposed_ratio"]
        0.151
    """

    schema: int = SCHEMA_VERSION
    run_id: str
    folder: str
    status: Status
    verdict: str
    findings: tuple[Finding, ...]
    figures: Mapping[str, float | None]
    facts: RunFacts
    phases: tuple[TimeShare, ...]
    is_upper_bound: bool
    causes: tuple[TimeShare, ...]
    collectives: tuple[CollectiveShare, ...]
    memory: tuple[DeviceMemory, ...]
    devices: tuple[DeviceFigures, ...]
    ranks: tuple[RankRow, ...]
    tuner: TunerSummary
    incidents: tuple[Incident, ...]
    monitoring: MonitoringCost
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    straggler_threshold: float


# The figures that a summary has, with their meaning. Ratios are of training time, which is without
# evaluation and checkpoints, unless stated otherwise.
FIGURES: Mapping[str, str] = {
    "steps": "recorded steps of the rank with the most",
    "seconds": "wall time of these steps",
    "step_seconds": "mean time of a step",
    "step_seconds_p50": "median time of a step",
    "step_seconds_p90": "90th percentile of step times",
    "step_seconds_p99": "99th percentile of step times",
    "samples_per_second": "of all ranks; unknown if ranks share samples (tensor parallelism)",
    "tokens_per_second": "of all ranks; unknown if ranks share tokens (tensor parallelism)",
    "mfu_ratio": "model FLOPs utilization over the whole run, mean of the ranks with a metrics log",
    "comm_ratio": "time with a collective in flight, of wall time; on a GPU an upper bound",
    "comm_exposed_ratio": "time in which training could only wait for communication",
    "imbalance_ratio": "exposed communication, because another rank was late",
    "latency_ratio": "exposed communication, by the fixed cost of each call",
    "redundancy_ratio": "exposed communication, by bytes beyond what the ZeRO stage needs",
    "bandwidth_ratio": "exposed communication, by the speed of the link",
    "pipeline_bubble_ratio": "stages of a pipeline waiting for another stage, without transfer",
    "data_ratio": "loading data",
    "forward_ratio": "forward",
    "backward_ratio": "backward",
    "optimizer_ratio": "optimizer",
    "generate_ratio": "generation",
    "other_ratio": "all other phases",
    "eval_ratio": "evaluation, as a share of wall time",
    "checkpoint_ratio": "checkpoints and rebuilds, as a share of wall time",
    "comm_wire_bytes_per_step": "bytes that a rank sends in a step, mean of the ranks",
    "comm_volume_ratio": "bytes sent over the reference of the ZeRO stage",
    "comm_coverage_ratio": "recorded collectives over counted ones, the lowest of the ranks with a "
    "metrics log",
    "link_bandwidth_ratio": "bandwidth over the best that the link sustained, the lowest",
    "memory_peak_ratio": "highest memory use over its limit, of all ranks and devices",
    "memory_headroom_ratio": "free share of the limit at the predicted next peak at the end, the "
    "lowest of the ranks with a metrics log",
    "oom_risk_ratio": "highest recorded out-of-memory risk",
    "device_utilization_ratio": "mean share of time in which a GPU was busy",
    "device_temperature_celsius": "highest temperature of a device",
    "straggler_score_ratio": "by what share of a step the slowest rank is behind the median rank; "
    "of the ranks with a metrics log",
    "loss": "loss of the last steps, mean of the ranks at the end; unknown if one of them was nan "
    "or inf",
    "same_losses": "1 if all ranks had equal losses, as when they are fed the same data",
    "gradient_norm_max": "highest gradient norm",
    "skipped_ratio": "share of steps whose update was skipped",
    "nonfinite_losses": "recorded steps whose loss was nan or inf, of the rank with the most; in "
    "jobs of more than 64 ranks, most ranks record every tenth step",
    "out_of_memory_reports": "reports on out-of-memory errors",
    "hang_reports": "reports on hangs",
    "exit_reports": "reports on ranks that exited uncleanly",
    "attempts": "attempts, restarts included",
    "monitoring_ratio": "share of the ranks' time that monitoring took",
    "dropped_records": "records that monitoring lost",
    "hook_failures": "exceptions in hooks of monitoring",
    "problems": "missing or damaged parts of the run folder",
}


def summarize(run: RecordedRun, metrics: RecordedMetrics) -> RunSummary:
    """Compute the summary of a run.

    Args:
        run: The step logs and reports.
        metrics: The metrics logs. Without them, causes of exposed communication, MFU, memory by
            category, stragglers and the cost of monitoring are unknown.

    Examples:
        >>> folder = Path("runs/20261123T005552-c44904")
        >>> summarize(read_run(folder), read_metrics(folder)).verdict
        'Training waited for communication 31 % of its time, mostly because another rank was late.'
    """
    each_time = {rank: _RankTime.of(steps) for rank, steps in run.ranks.items()}
    times = _with_all_steps(each_time)
    end_reasons = _end_reasons(run, metrics)
    facts = _facts(run, metrics)
    overcome = frozenset(_path(each, run) for each in run.reports if _is_overcome(each, run))
    status = _status(run, end_reasons.values(), overcome)
    phases = _phases(times)
    causes = _causes(times, metrics)
    rows = tuple(_rank_row(steps, each_time[rank], metrics) for rank, steps in run.ranks.items())
    memories = _memories(run, metrics)
    device_events = _device_events(run, metrics)
    device_figures = _devices(run, device_events)
    collectives = _collectives([run.ranks[rank] for rank in times], metrics)
    monitoring = _monitoring(metrics)
    problems = tuple(
        map(
            printable,
            (
                *run.problems,
                *_lost_beginnings(run, metrics),
                *_early_ends(run, metrics),
                *metrics.problems,
            ),
        )
    )
    incidents = tuple(
        Incident(
            kind=report.kind,
            path=_path(report, run),
            rank=report.rank,
            headline=report.headline,
            text=report.text,
        )
        for report in run.reports
    )
    figures = {
        **dict.fromkeys(FIGURES),
        **_step_figures(run, each_time, metrics),
        **{f"{share.name}_ratio": share.ratio for share in (*phases, *causes)},
        **_communication_figures(run, times, metrics),
        **_memory_figures(memories, run.ranks_at_end),
        **_device_figures(device_figures),
        **_loss_figures(run),
        "same_losses": metrics.ranks.get(0, RankMetrics()).value(across_ranks.RANKS_SAME_LOSS.name),
        "straggler_score_ratio": max(
            (row.straggler_score for row in rows if row.straggler_score is not None), default=None
        ),
        "out_of_memory_reports": _count(incidents, "out_of_memory"),
        "hang_reports": _count(incidents, "hang"),
        "exit_reports": _count(incidents, "exit"),
        "attempts": _attempts(run),
        "monitoring_ratio": monitoring.ratio,
        "dropped_records": sum(monitoring.dropped.values()) if metrics.ranks else None,
        "hook_failures": sum(monitoring.hook_failures.values()) if metrics.ranks else None,
        "problems": len(problems),
    }
    figures = {name: figures[name] for name in FIGURES}
    found = _Evidence(
        run=run,
        status=status,
        figures=figures,
        causes=causes,
        rows=rows,
        memories=memories,
        device_events=device_events,
        incidents=incidents,
        hanging=_hanging(run, facts),
        overcome=overcome,
        end_reasons=end_reasons,
        has_metrics=bool(metrics.ranks),
        facts=facts,
    )
    findings = tuple(sorted(_findings(found), key=_importance))
    return RunSummary(
        run_id=run.run_id,
        folder=printable(run.folder),
        status=status,
        verdict=_verdict(found, findings),
        findings=findings,
        figures=figures,
        facts=facts,
        phases=phases,
        is_upper_bound=any(steps.is_upper_bound for steps in run.ranks.values()),
        causes=causes,
        collectives=collectives,
        memory=_fullest(memories),
        devices=device_figures,
        ranks=rows,
        tuner=_tuner(run, metrics),
        incidents=incidents,
        monitoring=monitoring,
        problems=problems,
        notes=tuple(_notes(run, metrics)),
        straggler_threshold=found.limit(STRAGGLER_SCORE_HIGH),
    )


def summary_of(folder: Path) -> RunSummary:
    """Read a run folder and compute its summary.

    Args:
        folder: The run folder, such as `runs/20261123T005552-c44904`.

    Raises:
        RunFolderError: There is no such folder, or nothing in it is of a run.

    Examples:
        >>> summary_of(Path("runs/20261123T005552-c44904")).figures["step_seconds"]
        0.31
    """
    return summarize(read_run(folder), read_metrics(folder, SUMMARY_SERIES))


@dataclass(frozen=True, slots=True, kw_only=True)
class _RankTime:
    """Exact sums over all recorded steps of a rank, in seconds.

    Attributes:
        steps: Number of steps.
        training: Without evaluation and checkpoints.
        phases: By phase.
        comm: With a collective in flight; None if unknown.
        exposed: Exposed communication in training; None if unknown.
        comm_wall: Wall time of the steps whose communication is known.
        exposed_training: Training time of the steps whose exposed communication is known.
        exposed_steps: Number of these steps.
    """

    steps: int
    wall: float
    training: float
    phases: Mapping[str, float]
    comm: float | None
    exposed: float | None
    comm_wall: float
    exposed_training: float
    exposed_steps: int

    @classmethod
    def of(cls, steps: RankSteps) -> _RankTime:
        phases = {phase: steps.total(f"phase.{phase}") or 0.0 for phase in steps.names("phase")}
        wall = steps.total("seconds") or 0.0
        training = wall - sum(phases.get(phase, 0.0) for phase in NON_TRAINING_PHASES)
        exposed = steps.total("comm_exposed_seconds")
        if exposed is not None:
            for phase in NON_TRAINING_PHASES:
                exposed -= steps.total(f"comm_exposed.{phase}") or 0.0
        return cls(
            steps=steps.num_steps,
            wall=wall,
            training=training,
            phases=phases,
            comm=steps.total("comm_seconds"),
            exposed=exposed,
            comm_wall=wall * _known_share(steps, "comm_seconds", steps.column("seconds")),
            exposed_training=training
            * _known_share(steps, "comm_exposed_seconds", training_seconds(steps)),
            exposed_steps=steps.totals["comm_exposed_seconds"].count,
        )


def training_seconds(steps: RankSteps) -> Column:
    """Return the time of each row without evaluation and checkpoints, in seconds."""
    seconds = steps.column("seconds").astype(np.float64)
    for phase in NON_TRAINING_PHASES:
        if f"phase.{phase}" in steps.columns:
            seconds = seconds - steps.column(f"phase.{phase}")
    return seconds


def exposed_seconds(steps: RankSteps) -> Column:
    """Return the exposed communication of each row in training, in seconds; NaN if unknown."""
    seconds = steps.column("comm_exposed_seconds").astype(np.float64)
    for phase in NON_TRAINING_PHASES:
        if f"comm_exposed.{phase}" in steps.columns:
            seconds = seconds - steps.column(f"comm_exposed.{phase}")
    return seconds


def _known_share(steps: RankSteps, name: str, seconds: Column) -> float:
    """Return the share of the time of the steps in which a column is known."""
    if steps.totals[name].count == steps.num_steps:
        return 1.0
    known = seconds[~np.isnan(steps.column(name))].sum(dtype=np.float64)
    whole = seconds.sum(dtype=np.float64)
    return float(known / whole) if whole else 0.0


def has_collectives(steps: RankSteps) -> NDArray[np.bool_]:
    """Return in which rows collectives were recorded, also if there were none.

    The last steps of a killed rank have none, nor those after its monitoring process has ended.
    """
    known: NDArray[np.bool_] = ~np.isnan(steps.column("comm_seconds"))
    for name in steps.names("collective"):  # a call may have no duration
        if name.endswith(".calls"):
            known |= steps.column(f"collective.{name}") > 0
    return known


def _unrecorded_rows(steps: RankSteps) -> int:
    """Return the number of rows at the end that have neither collectives nor any reading.

    0 if they may be the last second of a killed rank.
    """
    known = has_collectives(steps)
    for kind in ("memory", "device"):  # calls of DDP may be unknown
        for name in steps.names(kind):
            known |= ~np.isnan(steps.column(f"{kind}.{name}"))
    rows, ended_at = np.flatnonzero(known), steps.column("ended_at")
    if not rows.size:
        return 0
    num_rows = steps.num_rows - 1 - int(rows[-1])
    is_long = float(ended_at[-1] - ended_at[rows[-1]]) > UNRECORDED_SECONDS
    return num_rows if num_rows > 1 and is_long else 0


def _steps_with_collectives(ranks: Iterable[RankSteps]) -> int:
    return sum(each.num_steps - _unrecorded_rows(each) * each.steps_per_row for each in ranks)


def _end_reasons(run: RecordedRun, metrics: RecordedMetrics) -> dict[int, str]:
    """Return how monitoring ended, by rank of the last attempt."""
    return {
        number: reason
        for number, rank in metrics.ranks.items()
        if _is_of_last_attempt(rank, run)
        for labels, value in rank.values(training.RUN_END_INFO.name).items()
        for name, reason in labels
        if name == "reason" and value
    }


def _lost_beginnings(run: RecordedRun, metrics: RecordedMetrics) -> Iterator[str]:
    """Yield the ranks whose log lost as many records as it lacks steps before its first one."""
    for rank, steps in run.ranks.items():
        missing = steps.first_step - 1
        counted = metrics.ranks.get(rank, RankMetrics())
        lost = counted.total(overhead.DROPPED_RECORDS.name, part="run_log") or 0.0
        if 0 < missing <= lost:
            yield (
                f"rank {rank}: steps 1 to {missing} are missing: {lost:.0f} records were lost, as "
                "the run folder was deleted during the run, or could not be written"
            )


def _notes(run: RecordedRun, metrics: RecordedMetrics) -> Iterator[str]:
    unknown = len(run.ranks.keys() - metrics.ranks.keys())
    if metrics.ranks and unknown:
        yield (
            f"How far {unknown} of {len(run.ranks)} ranks are behind the median rank, their "
            "headroom, leaks, coverage of collectives, and errors and throttling of their GPUs are "
            "not recorded: they have no metrics log. In jobs of more than 64 ranks, one rank per "
            "node writes it."
        )
    thinned = _num_thinned(run)
    if run.world_size and not has_tenth_step(run.ranks.values(), run.world_size):
        yield (
            f"{len(run.ranks_at_end)} of {run.world_size} ranks have a log. In jobs of more than "
            "64 ranks, most ranks record every tenth step, and there is none yet."
        )
    elif thinned:
        yield (
            f"{thinned} of {len(run.ranks)} ranks record every tenth step: a loss of nan or inf on "
            "one of them in the steps between is not recorded."
        )


def _num_thinned(run: RecordedRun) -> int:
    """Return how many ranks record every tenth step, in the last attempt or an earlier one.

    Before the tenth step, they have no log.
    """
    without_log = 0
    if run.world_size and not has_tenth_step(run.ranks.values(), run.world_size):
        without_log = run.world_size - len(run.ranks_at_end)
    return without_log + sum(steps.was_thinned for steps in run.ranks.values())


def _unrecorded_ends(run: RecordedRun) -> dict[int, str]:
    """Return the ranks whose last steps lack collectives and memory, and what to say of each."""
    found = {}
    for rank, steps in run.ranks.items():
        if num_rows := _unrecorded_rows(steps):
            ended_at = steps.column("ended_at")
            seconds = float(ended_at[-1] - ended_at[-1 - num_rows])
            found[rank] = (
                f"rank {rank}: the last {num_rows * steps.steps_per_row} recorded steps, "
                f"{format_duration(seconds)}, have neither collectives nor memory. {_NO_METRICS}"
            )
    return found


def _early_ends(run: RecordedRun, metrics: RecordedMetrics) -> Iterator[str]:
    """Yield the ranks that trained on after their metrics had ended."""
    unrecorded = _unrecorded_ends(run)
    yield from unrecorded.values()
    interval = run.setting("run_log", "metrics_interval_seconds")
    if not isinstance(interval, int | float) or interval <= 0:
        return
    for rank, counted in metrics.ranks.items():
        steps, last = run.ranks.get(rank), counted.value(overhead.WATCH_LAST_UPDATE_TIMESTAMP.name)
        if steps is None or last is None or rank in unrecorded or steps.is_thinned:
            continue
        ended_at = steps.column("ended_at")
        # A killed rank has metrics until an interval before its end, and a busy disk delays them.
        if float(ended_at[-1]) - last > EARLY_END_INTERVALS * interval:
            later = int((ended_at > last).sum()) * steps.steps_per_row
            yield (
                f"rank {rank}: the metrics end {format_duration(float(ended_at[-1]) - last)} "
                f"before the last step, so {later} steps may lack collectives and memory. "
                f"{_NO_METRICS}"
            )


def _status(run: RecordedRun, reasons: Collection[str], overcome: Collection[str]) -> Status:
    for reason in ("out_of_memory", "exception", "interrupted", "peer_failed"):
        if reason in reasons:
            return reason
    if is_locked(run.folder):
        return "running"
    kinds = {each.kind for each in run.reports if _path(each, run) not in overcome}
    if "completed" in reasons or run.has_targets is False:
        return "completed"
    if "exit" in kinds:
        return "killed"
    if "out_of_memory" in kinds:
        return "out_of_memory"
    return "hang" if "hang" in kinds else "unknown"


def _path(report: ReportFile, run: RecordedRun) -> str:
    return printable(report.path.relative_to(run.folder))


def _is_overcome(report: ReportFile, run: RecordedRun) -> bool:
    """Whether the run trained on after what is reported, as far as the times in the report show.

    The last time in a report may be that of the rank's last record. In large jobs, most ranks
    record every tenth step, so ranks that record each step have up to nine later ones.
    """
    since = max(times_in(report.text), default=math.inf) + MAX_LAG_SECONDS
    gaps = [steps.usual_gap for rank, steps in run.ranks.items() if rank == report.rank]
    # Of several steps in a row, only the last is known to be later.
    later = [
        (int((steps.column("ended_at") > since).sum()) - 1) * steps.steps_per_row + 1
        for steps in run.ranks.values()
    ]
    has_ended = report.has_resumed or max(later, default=0) > max(gaps, default=LONGEST_GAP)
    return has_ended and report.kind != "leak"


def _is_of_last_attempt(rank: RankMetrics, run: RecordedRun) -> bool:
    """Whether a rank wrote in the last attempt: a restart may have fewer ranks."""
    return (
        not run.attempts
        or not rank.unix_seconds.size
        or (float(rank.unix_seconds[-1]) >= max(run.attempts))
    )


def _facts(run: RecordedRun, metrics: RecordedMetrics) -> RunFacts:
    ends = [float(steps.column("ended_at")[-1]) for steps in run.ranks.values()]
    starts = [
        float(steps.column("ended_at")[0]) - float(steps.column("seconds")[0]) * steps.steps_per_row
        for steps in run.ranks.values()
    ]
    info: dict[str, str] = {}
    for rank in metrics.ranks.values():
        for labels in rank.values(training.RUN_INFO.name):
            info = info or {name: printable(text) for name, text in labels}
    return RunFacts(
        world_size=run.world_size,
        hosts=tuple(dict.fromkeys(steps.host for steps in run.ranks_at_end.values())),
        started=min([*run.attempts, *starts], default=None),
        ended=max(ends, default=None),
        attempts=_attempts(run),
        info=info,
    )


def _attempts(run: RecordedRun) -> int:
    restarts = max((int(s.totals["attempt"].maximum) for s in run.ranks.values()), default=0)
    return max(len(run.attempts), restarts + 1)


def _with_all_steps(times: Mapping[int, _RankTime]) -> dict[int, _RankTime]:
    """Return the ranks with at least half as many steps as the rank with the most.

    In large jobs most ranks record every tenth step, which is more often one with an evaluation or
    a checkpoint than the steps between.
    """
    most = max((time.steps for time in times.values()), default=0)
    return {rank: time for rank, time in times.items() if 2 * time.steps >= most}


def _shares(
    seconds: Mapping[str, float], training: float, steps: int, ranks: int
) -> tuple[TimeShare, ...]:
    return tuple(
        TimeShare(
            name=name,
            seconds=spent / ranks,
            seconds_per_step=spent / steps,
            ratio=spent / training,
        )
        for name, spent in seconds.items()
    )


def _phases(times: Mapping[int, _RankTime]) -> tuple[TimeShare, ...]:
    """Return the phases by time, those outside of training last; their ratio is of wall time."""
    totals: dict[str, float] = {}
    for time in times.values():
        for phase, seconds in time.phases.items():
            totals[phase] = totals.get(phase, 0.0) + seconds
    steps = sum(time.steps for time in times.values())
    training_time = sum(time.training for time in times.values())
    wall = sum(time.wall for time in times.values())
    if not steps or training_time <= 0 or wall <= 0:
        return ()
    order = sorted(totals, key=lambda phase: -totals[phase])
    inside = {phase: totals[phase] for phase in order if phase not in NON_TRAINING_PHASES}
    outside = {phase: totals[phase] for phase in order if phase in NON_TRAINING_PHASES}
    return (
        *_shares(inside, training_time, steps, len(times)),
        *_shares(outside, wall, steps, len(times)),
    )


def _metrics_training_seconds(rank: RankMetrics) -> float:
    """Return the training time that a rank's counters contain."""
    name = training.PHASE_SECONDS.name
    outside = sum(rank.total(name, phase=phase) or 0.0 for phase in NON_TRAINING_PHASES)
    return (rank.total(name) or 0.0) - outside


def _causes(times: Mapping[int, _RankTime], metrics: RecordedMetrics) -> tuple[TimeShare, ...]:
    """Return exposed time by cause, and the rest as "unknown"; empty if nothing was recorded.

    The exposed time is that of the recorded steps, so the causes add up to it. The counters give
    only their proportions: of a killed rank they contain fewer steps.
    """
    ranks = [
        rank
        for rank in metrics.ranks.values()
        if rank.total(communication.COMM_CAUSE_SECONDS.name) is not None
    ]
    seconds = {
        cause: sum(
            rank.total(communication.COMM_CAUSE_SECONDS.name, cause=cause) or 0.0 for rank in ranks
        )
        for cause in CAUSE.values
    }
    exposed = sum(rank.total(communication.COMM_EXPOSED_SECONDS.name) or 0.0 for rank in ranks)
    known = [time for time in times.values() if time.exposed is not None]
    training_time = sum(time.exposed_training for time in known)
    if not ranks or training_time <= 0:
        return ()
    seconds = dict(sorted(seconds.items(), key=lambda item: -item[1]))
    unknown = exposed - sum(seconds.values())
    # Without such calls, a residue of rounding is left.
    seconds["unknown"] = unknown if unknown > 1e-6 * exposed else 0.0
    scale = sum(time.exposed or 0.0 for time in known) / exposed if exposed > 0 else 0.0
    seconds = {cause: spent * scale for cause, spent in seconds.items()}
    return _shares(seconds, training_time, sum(time.exposed_steps for time in known), len(known))


def _collectives(
    ranks: Sequence[RankSteps], metrics: RecordedMetrics
) -> tuple[CollectiveShare, ...]:
    steps = _steps_with_collectives(ranks)
    ops = dict.fromkeys(
        name.rsplit(".", 1)[0] for each in ranks for name in each.names("collective")
    )

    def total(op: str, part: str) -> float | None:
        found = [each.total(f"collective.{op}.{part}") for each in ranks]
        known = [value for value in found if value is not None]
        return sum(known) / steps if known else None

    def bandwidth(op: str) -> float | None:
        return min(
            (
                value
                for rank in metrics.ranks.values()
                for value in rank.values(communication.COMM_BUS_BANDWIDTH.name, op=op).values()
            ),
            default=None,
        )

    shares = [
        CollectiveShare(
            op=op,
            calls_per_step=total(op, "calls") or 0.0,
            payload_bytes_per_step=total(op, "payload_bytes") or 0.0,
            wire_bytes_per_step=total(op, "wire_bytes") or 0.0,
            seconds_per_step=total(op, "seconds"),
            bandwidth=bandwidth(op),
        )
        for op in ops
    ]
    return tuple(sorted(shares, key=lambda share: -share.wire_bytes_per_step))


def _rank_row(steps: RankSteps, time: _RankTime, metrics: RecordedMetrics) -> RankRow:
    rank = metrics.ranks.get(steps.rank)
    peaks = [_peak_and_limit(steps, device) for device in _memory_devices(steps)]
    ratios = [ratio for peak, limit in peaks if (ratio := _ratio(peak, limit)) is not None]
    risks = [steps.totals[f"oom_risk.{device}"].maximum for device in steps.names("oom_risk")]
    busy = [
        steps.totals[f"device.{name}"].mean
        for name in steps.names("device")
        if name.endswith(".utilization_ratio")
    ]
    phase, score = (None, None) if rank is None else _straggler(rank)
    wait = None if rank is None else rank.total(communication.COMM_WAIT_SECONDS.name)
    return RankRow(
        rank=steps.rank,
        host=steps.host,
        steps=steps.num_steps,
        last_step=int(steps.column("step")[-1]),
        step_seconds=time.training / time.steps,
        exposed_ratio=_ratio(time.exposed, time.exposed_training),
        wait_ratio=None if rank is None else _ratio(wait, _metrics_training_seconds(rank)),
        data_ratio=_ratio(time.phases.get("data", 0.0), time.training) or 0.0,
        memory_peak_ratio=max(ratios, default=None),
        oom_risk_ratio=max((risk for risk in risks if not math.isnan(risk)), default=None),
        utilization_ratio=max((mean for mean in busy if mean is not None), default=None),
        mfu_ratio=None if rank is None else _mfu(rank),
        straggler_phase=phase,
        straggler_score=score,
    )


def _straggler(rank: RankMetrics) -> tuple[str | None, float | None]:
    """Return the phase in which a rank is slowest, and its median score over time."""
    scores: dict[str, float] = {}
    for phase in _by_label(rank, communication.STRAGGLER_SCORE, "phase"):
        _, values = rank.over_time(communication.STRAGGLER_SCORE.name, phase=phase)
        known = values[~np.isnan(values)]
        if known.size:
            scores[phase] = float(np.median(known))
    slowest = max(scores, key=lambda phase: scores[phase], default=None)
    return slowest, None if slowest is None else scores[slowest]


def _mfu(rank: RankMetrics) -> float | None:
    """Return the MFU over all sessions of a rank."""
    peak = max(rank.values(training.PEAK_FLOPS.name).values(), default=None)
    generated = rank.total(training.PHASE_SECONDS.name, phase="generate") or 0.0
    seconds = _metrics_training_seconds(rank) - generated
    return _ratio(_ratio(rank.total(training.FLOPS.name), seconds), peak)


def _memory_devices(steps: RankSteps) -> list[str]:
    return list(dict.fromkeys(name.rsplit(".", 1)[0] for name in steps.names("memory")))


def _peak_and_limit(steps: RankSteps, device: str) -> tuple[float | None, float | None]:
    for state in ("peak_allocated", "allocated"):  # some kernels do not report the peak
        totals = steps.totals.get(f"memory.{device}.{state}")
        if totals is not None and totals.count:
            return totals.maximum, _last(steps.column(f"memory.{device}.limit"))
    return None, _last(steps.column(f"memory.{device}.limit"))


def _memories(run: RecordedRun, metrics: RecordedMetrics) -> tuple[DeviceMemory, ...]:
    """Return the memory of each rank and device, by kind of device, GPUs first."""
    rows = [
        _device_memory(steps, device, metrics)
        for steps in run.ranks.values()
        for device in _memory_devices(steps)
    ]
    return tuple(sorted(rows, key=lambda row: _gpus_first(row.kind)))


def _fullest(memories: Sequence[DeviceMemory]) -> tuple[DeviceMemory, ...]:
    """Return the memory of the fullest rank for each kind of device."""
    kinds = dict.fromkeys(each.kind for each in memories)
    return tuple(
        max(
            (each for each in memories if each.kind == kind),
            key=lambda each: (each.peak_ratio or 0.0, each.peak_bytes or 0.0),
        )
        for kind in kinds
    )


def _gpus_first(kind: str) -> tuple[bool, str]:
    return kind == "cpu", kind


def _device_memory(steps: RankSteps, device: str, metrics: RecordedMetrics) -> DeviceMemory:
    peak, limit = _peak_and_limit(steps, device)
    rank = metrics.ranks.get(steps.rank, RankMetrics())
    categories = _by_label(rank, memory.MEMORY_CATEGORY_BYTES, "category", device=device)
    baseline = rank.value(memory.MEMORY_BASELINE.name, device=device)
    if categories and baseline:
        categories["baseline"] = baseline
    risks = steps.column(f"oom_risk.{device}")
    return DeviceMemory(
        device=device,
        rank=steps.rank,
        peak_bytes=peak,
        limit_bytes=limit,
        headroom_bytes=rank.value(memory.MEMORY_HEADROOM.name, device=device),
        risk_ratio=_last(risks),
        highest_risk_ratio=float(np.nanmax(risks)) if _last(risks) is not None else None,
        categories=dict(sorted(categories.items(), key=lambda item: -item[1])),
        leak_bytes_per_step=_by_label(rank, memory.MEMORY_LEAK, "category", device=device),
    )


def _by_label(rank: RankMetrics, spec: MetricSpec, label: str, **labels: str) -> dict[str, float]:
    """Return the last values of a metric by one of its labels; a damaged log may lack it."""
    found = ((dict(key), value) for key, value in rank.values(spec.name, **labels).items())
    return {names[label]: value for names, value in found if label in names}


def _totals_by(
    metrics: RecordedMetrics, spec: MetricSpec, *, divided_by: float = 1.0
) -> dict[str, float]:
    """Return the increase of a counter over all ranks by its labels, without those that are 0."""
    sums: dict[str, float] = {}
    for rank in metrics.ranks.values():
        for last in rank.last_by_session:
            for key, value in last.items():
                if key.name == spec.name and value:
                    label = " ".join(text for name, text in key.labels if name != "device")
                    sums[label] = sums.get(label, 0.0) + value / divided_by
    return sums


# Metrics of devices that are 0 in a healthy run, with their names in reports.
_DEVICE_EVENTS = {
    devices.DEVICE_THROTTLED_SECONDS.name: "throttled seconds",
    devices.DEVICE_ECC_ERRORS.name: "ECC errors",
    devices.DEVICE_LINK_ERRORS.name: "link errors",
    devices.DEVICE_XID_ERRORS.name: "XID errors",
    devices.DEVICE_ROW_REMAP.name: "row remaps",
    devices.DEVICE_LOST.name: "lost",
}
# Those that are 1 or 0. A later process on the host reports the same state, not one more.
_DEVICE_STATES = frozenset((devices.DEVICE_ROW_REMAP.name, devices.DEVICE_LOST.name))
# Faults of an earlier attempt, after which the run trained on.
_PAST_SENTENCE = " The run trained on."
_PAST_ADVICE = "Have the node checked before it is used again."
# The power cap is usual at full load; the alert on throttling leaves it out too.
_USUAL_REASON = ("reason", "power_cap")


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeviceEvents:
    """What a device has counted while a rank was on a host.

    Attributes:
        name: Name of the metric, one of `_DEVICE_EVENTS`.
        labels: Values of its labels, in the order of their names, without the device.
        seconds: Time of the rank's steps on this host; 0 if it is not recorded.
        is_past: Whether all of it is of earlier attempts, after which the run trained on.
    """

    rank: int
    host: str
    device: str
    name: str
    labels: tuple[str, ...]
    count: float
    seconds: float
    is_past: bool

    @property
    def per_second(self) -> float:
        """Mean count per second; of throttled seconds, the share of time."""
        return _ratio(self.count, self.seconds) or 0.0


def _device_events(run: RecordedRun, metrics: RecordedMetrics) -> tuple[_DeviceEvents, ...]:
    """Return the counts above 0 of each rank, host and device.

    A restart may put a rank on another host, so each process counts for the host of its own. It
    may also give a card to another rank, which reports the same state of it.
    """
    counts: dict[tuple[int, str, str, str, tuple[str, ...]], float] = {}
    seconds: dict[tuple[int, str], float] = {}
    present = set()
    cards: dict[tuple[str, str, tuple[str, ...]], tuple[int, str, str, str, tuple[str, ...]]] = {}
    has_trained_on = _has_trained_since_last_start(run)
    for number, rank in metrics.ranks.items():
        for head, last in zip(rank.heads, rank.last_by_session, strict=True):
            host, is_newest = printable(head.host), last is rank.last_by_session[-1]
            is_present = not has_trained_on or (is_newest and _is_of_last_attempt(rank, run))
            uuids = _uuids(last)
            for key, value in last.items():
                if key.name == training.PHASE_SECONDS.name:
                    seconds[number, host] = seconds.get((number, host), 0.0) + value
                elif _is_pending_remap(key) and not is_newest:
                    continue  # a reset has ended it, or the newest process reports it too
                elif key.name in _DEVICE_EVENTS and value > 0 and _USUAL_REASON not in key.labels:
                    device = printable(dict(key.labels).get("device", ""))
                    labels = tuple(printable(text) for name, text in key.labels if name != "device")
                    place = (number, host, device, key.name, labels)
                    is_state = key.name in _DEVICE_STATES
                    if is_state and device in uuids:
                        card = (uuids[device], key.name, labels)
                        known = cards.get(card)
                        if known is not None and (known in present or not is_present):
                            place = known
                        elif known is not None:
                            counts.pop(known, None)
                        cards[card] = place
                    before = counts.get(place, 0.0)
                    counts[place] = max(before, value) if is_state else before + value
                    if is_present:
                        present.add(place)
    return tuple(
        _DeviceEvents(
            rank=rank,
            host=host,
            device=device,
            name=name,
            labels=labels,
            count=count,
            seconds=seconds.get((rank, host), 0.0),
            is_past=(rank, host, device, name, labels) not in present,
        )
        for (rank, host, device, name, labels), count in counts.items()
    )


def _uuids(last: Mapping[SeriesKey, float]) -> dict[str, str]:
    """Return the UUID of each device of a process, as far as it is recorded."""
    infos = (dict(key.labels) for key in last if key.name == devices.DEVICE_INFO.name)
    return {printable(each.get("device", "")): each["uuid"] for each in infos if each.get("uuid")}


def _is_pending_remap(key: SeriesKey) -> bool:
    return key.name == devices.DEVICE_ROW_REMAP.name and ("state", "pending") in key.labels


def _has_trained_since_last_start(run: RecordedRun) -> bool:
    """Whether the last of several attempts has recorded a step after its start was noted."""
    ends = [float(steps.column("ended_at")[-1]) for steps in run.ranks.values()]
    return len(run.attempts) > 1 and max(ends, default=0.0) > max(run.attempts)


def _devices(run: RecordedRun, counted: Sequence[_DeviceEvents]) -> tuple[DeviceFigures, ...]:
    parts: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for steps in run.ranks.values():
        for name in steps.names("device"):
            device, reading = name.rsplit(".", 1)
            totals = steps.totals[f"device.{name}"]
            if totals.mean is not None:
                kind = parts.setdefault(device.split(":")[0], {})
                kind.setdefault(reading, []).append((totals.minimum, totals.mean, totals.maximum))
    events: dict[str, float] = {}
    for metric, title in _DEVICE_EVENTS.items():
        for each in counted:
            if each.name == metric:
                text = ", ".join(filter(None, (title, " ".join(each.labels))))
                events[text] = events.get(text, 0.0) + each.count
    kinds = sorted(parts, key=_gpus_first)
    return tuple(
        DeviceFigures(
            device=kind,
            readings={
                reading: (
                    min(each[0] for each in found),
                    sum(each[1] for each in found) / len(found),
                    max(each[2] for each in found),
                )
                for reading, found in parts[kind].items()
            },
            events=events if kind == kinds[0] else {},
        )
        for kind in kinds
    )


def _monitoring(metrics: RecordedMetrics) -> MonitoringCost:
    ranks = metrics.ranks.values()
    wall = sum(
        (rank.total(training.PHASE_SECONDS.name) or 0.0) + _seconds_after_steps(rank)
        for rank in ranks
    )
    num_ranks = max(1, len(metrics.ranks))
    seconds = _totals_by(metrics, overhead.WATCH_SECONDS, divided_by=num_ranks)
    return MonitoringCost(
        ratio=_ratio(sum(seconds.values()) * num_ranks, wall) if seconds else None,
        seconds=dict(sorted(seconds.items(), key=lambda item: -item[1])),
        dropped=_totals_by(metrics, overhead.DROPPED_RECORDS),
        hook_failures=_totals_by(metrics, overhead.HOOK_FAILURES),
    )


def _seconds_after_steps(rank: RankMetrics) -> float:
    """Return the time after the last step of each process, in which monitoring continued."""
    name, last_step = overhead.WATCH_LAST_UPDATE_TIMESTAMP.name, training.LAST_STEP_TIMESTAMP.name
    seconds = 0.0
    for last in rank.last_by_session:
        ends = {key.name: value for key, value in last.items() if key.name in (name, last_step)}
        seconds += max(0.0, ends.get(name, 0.0) - ends.get(last_step, math.inf))
    return seconds


def _tuner(run: RecordedRun, metrics: RecordedMetrics) -> TunerSummary:
    rank = metrics.ranks.get(0, RankMetrics())
    states = _by_label(rank, tuner.TUNER_STATE, "state")
    symptoms = _by_label(rank, tuner.TUNER_SYMPTOM, "symptom")
    mode = run.setting("tuner", "mode")
    decisions = tuple(decision for line in run.decisions if (decision := _decision(line)))
    if mode == "auto" and states and rank.total(window.RESTARTS.name) is None:
        mode = "advise"  # not a TrainingRun
    return TunerSummary(
        mode=printable(mode) if isinstance(mode, str) else None,
        state=next((state for state, is_current in states.items() if is_current), None),
        symptoms={name: value for name, value in symptoms.items() if value} if symptoms else None,
        decisions=decisions,
        discarded_observations=round(rank.total(tuner.TUNER_DISCARDED_OBSERVATIONS.name) or 0.0),
    )


def _decision(line: Mapping[str, Any]) -> TunerDecision | None:
    """Return a line of decisions.jsonl; None if it is of another schema."""
    try:
        changes = ", ".join(
            f"{change['knob']} {_knob_value(change['before'])} -> {_knob_value(change['after'])}"
            for change in line["changes"]
        )
        return TunerDecision(
            number=_integer(line["number"]),
            step=_integer(line["step"]),
            change=printable(changes),
            verdict=printable(line["verdict"]),
            symptom=printable(line["symptom"]["name"]),
            reason=printable(line["reason"]),
            numerics=printable(line["numerics"]),
            gain=_number(line.get("gain")),
            lower=_number(line.get("lower")),
            upper=_number(line.get("upper")),
            predicted_gain=_number(line.get("predicted_gain")),
            pairs=_integer(line.get("pairs", 0)),
            steps=_integer(line.get("steps", 0)),
            exploration_seconds=float(line.get("exploration_seconds", 0.0)),
        )
    except (KeyError, OverflowError, TypeError, ValueError):
        return None


def _integer(value: Any) -> int:
    """Return a count.

    Raises:
        OverflowError, TypeError, ValueError: It is none, or larger than JSON can hold.
    """
    number = int(value)
    if abs(number) >= 2**53:
        raise OverflowError(number)
    return number


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def _knob_value(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def shared_work(run: RecordedRun, metrics: RecordedMetrics) -> frozenset[str]:
    """Return which of "samples" and "tokens" ranks share, so that a sum over ranks is too large.

    The groups are in the metrics logs; AutoTP is in the ds config. See `WORK_SHARED_BY`.
    """
    roles = {
        dict(key.labels).get("group")
        for rank in metrics.ranks.values()
        for last in rank.last_by_session
        for key in last
        if key.name == communication.COMM_SECONDS.name
    }
    tensor = (run.ds_config or {}).get("tensor_parallel")
    size = tensor.get("autotp_size") if isinstance(tensor, Mapping) else None
    if isinstance(size, int) and size > 1:
        roles.add("tp")
    return frozenset(work for role in roles for work in WORK_SHARED_BY.get(role or "", ()))


def _step_figures(
    run: RecordedRun, times: Mapping[int, _RankTime], metrics: RecordedMetrics
) -> dict[str, float | None]:
    if not run.ranks:
        return {}
    reference = max(run.ranks.values(), key=lambda steps: (steps.num_steps, -steps.rank))
    seconds = training_seconds(reference)
    complete = _with_all_steps(times).values()
    steps = sum(time.steps for time in complete)
    training_time = sum(time.training for time in complete)

    shared = shared_work(run, metrics)
    quantiles: list[float | None] = [None] * 3
    # Means of several steps vary less than the steps.
    if len(seconds) >= MIN_STEPS_FOR_QUANTILES and reference.steps_per_row == 1:
        quantiles = [float(q) for q in np.quantile(seconds, [0.5, 0.9, 0.99])]
    return {
        "steps": float(reference.num_steps),
        "seconds": times[reference.rank].wall,
        "step_seconds": training_time / steps,
        "step_seconds_p50": quantiles[0],
        "step_seconds_p90": quantiles[1],
        "step_seconds_p99": quantiles[2],
        **{
            f"{name}_per_second": None if name in shared else _per_second(run, name)
            for name in ("samples", "tokens")
        },
    }


def _per_second(run: RecordedRun, name: str) -> float | None:
    """Return samples or tokens per second of all ranks; None if none are known.

    An elastic job has another rate with each number of ranks. Ranks that record every tenth step,
    and those without a log, are counted like the others.
    """
    by_world_size: dict[int, list[tuple[float, float]]] = {}
    for steps in run.ranks.values():
        sizes, values = steps.column("world_size"), steps.column(name)
        seconds = training_seconds(steps) * steps.steps_per_row  # a row has the means of its steps
        values = values * steps.steps_per_row
        for size in np.unique(sizes).tolist():
            is_used = (sizes == size) & ~np.isnan(values)
            done = float(values[is_used].sum(dtype=np.float64))
            by_world_size.setdefault(size, []).append((done, float(seconds[is_used].sum())))
    work = time = 0.0
    for size, ranks in by_world_size.items():
        # In a pipeline, only the ranks of some stages have tokens.
        rate = sum(_ratio(*each) or 0.0 for each in ranks) / len(ranks)
        longest = max(each[1] for each in ranks)
        work += size * rate * longest
        time += longest
    return _ratio(work, time)


def _communication_figures(
    run: RecordedRun, times: Mapping[int, _RankTime], metrics: RecordedMetrics
) -> dict[str, float | None]:
    def share(part: Callable[[_RankTime], float | None], of: Callable[[_RankTime], float]) -> Any:
        known = [time for time in times.values() if part(time) is not None]
        return _ratio(sum(part(time) or 0.0 for time in known), sum(map(of, known)))

    wire_bytes = [
        steps.total(f"collective.{name}")
        for steps in (run.ranks[rank] for rank in times)
        for name in steps.names("collective")
        if name.endswith(".wire_bytes")
    ]
    known_bytes = [value for value in wire_bytes if value is not None]
    ranks = metrics.ranks.values()
    coverage = [rank.value(communication.COMM_COVERAGE_RATIO.name) for rank in ranks]
    volume = [rank.value(communication.COMM_VOLUME_RATIO.name) for rank in ranks]
    mfu = [ratio for rank in ranks if (ratio := _mfu(rank)) is not None]
    return {
        "comm_ratio": share(lambda time: time.comm, lambda time: time.comm_wall),
        "comm_exposed_ratio": share(lambda time: time.exposed, lambda time: time.exposed_training),
        "comm_wire_bytes_per_step": _ratio(
            sum(known_bytes) if known_bytes else None,
            _steps_with_collectives(run.ranks[rank] for rank in times),
        ),
        "comm_volume_ratio": max((v for v in volume if v is not None), default=None),
        "comm_coverage_ratio": min((v for v in coverage if v is not None), default=None),
        "link_bandwidth_ratio": min(_link_ratios(metrics, run.ranks_at_end), default=None),
        "pipeline_bubble_ratio": _pipeline_bubble(metrics),
        "mfu_ratio": sum(mfu) / len(mfu) if mfu else None,
    }


def _pipeline_bubble(metrics: RecordedMetrics) -> float | None:
    """Return the share of training time in which a stage waited for another; None if no stages."""
    waits = [
        (wait, _metrics_training_seconds(rank))
        for rank in metrics.ranks.values()
        if (wait := rank.total(communication.COMM_WAIT_SECONDS.name, group="pp")) is not None
    ]
    return _ratio(sum(wait for wait, _ in waits), sum(seconds for _, seconds in waits))


def _link_ratios(metrics: RecordedMetrics, at_end: Collection[int]) -> Iterator[float]:
    for rank in (metrics.ranks[number] for number in at_end if number in metrics.ranks):
        best = _by_label(rank, communication.COMM_LINK_BEST_BANDWIDTH, "group")
        now = _by_label(rank, communication.COMM_LINK_BANDWIDTH, "group")
        for group, bandwidth in now.items():
            ratio = _ratio(bandwidth, best.get(group))
            if ratio is not None:
                yield min(ratio, 1.0)  # a bandwidth above the best has not lasted yet


def _memory_figures(
    memories: Sequence[DeviceMemory], at_end: Collection[int]
) -> dict[str, float | None]:
    def known(values: Iterable[float | None]) -> list[float]:
        return [value for value in values if value is not None]

    headrooms = known(each.headroom_ratio for each in memories if each.rank in at_end)
    return {
        "memory_peak_ratio": max(known(each.peak_ratio for each in memories), default=None),
        "memory_headroom_ratio": min(headrooms, default=None),
        "oom_risk_ratio": max(known(each.highest_risk_ratio for each in memories), default=None),
    }


def _device_figures(figures: Sequence[DeviceFigures]) -> dict[str, float | None]:
    """Return utilization and temperature; a rank on the CPU measures only its own use of it."""
    gpus = [each.readings for each in figures if each.device != "cpu"]
    utilization = [each["utilization_ratio"][1] for each in gpus if "utilization_ratio" in each]
    hottest = [
        each.readings["temperature_celsius"][2]
        for each in figures
        if "temperature_celsius" in each.readings
    ]
    return {
        "device_utilization_ratio": min(utilization, default=None),
        "device_temperature_celsius": max(hottest, default=None),
    }


def _loss_figures(run: RecordedRun) -> dict[str, float | None]:
    if not run.ranks:
        return {}
    first = next(iter(run.ranks.values()))
    at_end = run.ranks_at_end.values()
    losses = [loss for each in at_end if (loss := last_loss(each)) is not None]
    loss = sum(losses) / len(losses) if losses else math.nan
    steps = sum(each.num_steps for each in run.ranks.values())
    norms = first.totals["gradient_norm"]
    return {
        "loss": loss if math.isfinite(loss) else None,
        "gradient_norm_max": norms.maximum if norms.count else None,
        "skipped_ratio": sum(s.total("skipped") or 0.0 for s in run.ranks.values()) / steps,
        "nonfinite_losses": max(s.total("nonfinite_loss") or 0.0 for s in run.ranks.values()),
    }


def last_loss(steps: RankSteps) -> float | None:
    """Return the mean of the losses of a rank in its last steps; None if none is known.

    A rank that records each tenth step has one of them. It is NaN if one of the losses was not
    finite: the mean of the others would hide that.
    """
    if not steps.num_losses:
        return None
    num = num_last_steps(steps.num_losses)
    numbers, losses = steps.last_losses[-num:].T
    return float(losses[numbers > numbers[-1] - num].mean())


def num_last_steps(num: float) -> int:
    """Return over how many of the last steps the last loss is the mean.

    Args:
        num: Number of steps with a loss.
    """
    return min(LAST_STEPS, (round(num) + 9) // 10)


def _count(incidents: Sequence[Incident], kind: str) -> int:
    return sum(incident.kind == kind for incident in incidents)


def _last(values: Column) -> float | None:
    known = values[~np.isnan(values)]
    return float(known[-1]) if known.size else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole and math.isfinite(whole) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """The parts of a summary that findings are made from.

    Attributes:
        end_reasons: How monitoring ended, by rank of the last attempt.
        has_metrics: Whether there is a metrics log.
        hanging: Paths of the reports on a hang that had not ended when the run or its log did.
        overcome: Paths of the reports after which the run trained on.
    """

    run: RecordedRun
    status: Status
    figures: Mapping[str, float | None]
    causes: Sequence[TimeShare]
    rows: Sequence[RankRow]
    memories: Sequence[DeviceMemory]
    device_events: Sequence[_DeviceEvents]
    incidents: Sequence[Incident]
    hanging: Collection[str]
    overcome: Collection[str]
    end_reasons: Mapping[int, str]
    has_metrics: bool
    facts: RunFacts

    def figure(self, name: str) -> float:
        """Return a figure; 0 if it is not recorded."""
        return self.figures[name] or 0.0

    def limit(self, threshold: Threshold) -> float:
        """Return a threshold as the settings of the run have it."""
        own = self.run.setting("alerts", "thresholds")
        value = own.get(threshold.name) if isinstance(own, Mapping) else None
        return float(value) if isinstance(value, int | float) else float(THRESHOLDS[threshold.name])


def _hanging(run: RecordedRun, facts: RunFacts) -> frozenset[str]:
    """Return the paths of the reports on hangs of the last attempt after which no step ended."""
    since = max(*run.attempts, facts.ended or 0.0, 0.0)
    return frozenset(
        _path(report, run)
        for report in run.reports
        if report.kind == "hang" and not report.has_resumed
        if next(iter(times_in(report.text)), -1.0) >= since
    )


def _findings(found: _Evidence) -> Iterator[Finding]:
    yield from _incident_findings(found)
    yield from _loss_findings(found)
    yield from _data_findings(found)
    yield from _communication_findings(found)
    yield from _memory_findings(found)
    yield from _time_findings(found)
    yield from _device_findings(found)
    yield from _monitoring_findings(found)


def _importance(finding: Finding) -> tuple[int, float]:
    order: Mapping[Severity, int] = {"critical": 0, "warning": 1, "info": 2}
    return order[finding.severity], -finding.cost_ratio


_INCIDENT_ADVICE = {
    "out_of_memory": "Follow the numbered list at the end of the report.",
    "hang": "Look at the missing ranks first: their stacks and their host.",
    "exit": "Look at the log of this rank and at the kernel log of its host.",
    "leak": "Look at the allocation sites in the report.",
}


def _incident_advice(incident: Incident) -> str:
    first = re.search(rf"{AFTER_FIRST}(\d+) had", incident.headline)
    if incident.kind != "exit" or (FAILED not in incident.headline and first is None):
        return _INCIDENT_ADVICE[incident.kind]
    rank = incident.rank if first is None else first[1]
    return f"Look at the log of rank {rank}, which failed first: its traceback, or its signal."


def _incident_findings(found: _Evidence) -> Iterator[Finding]:
    ended = found.status in ("out_of_memory", "hang", "killed", "exception", "peer_failed")
    kinds = dict.fromkeys(incident.kind for incident in found.incidents)
    end_kinds = {each.kind for each in found.incidents if each.path not in found.overcome}
    end_kinds.discard("leak")
    for kind in kinds:
        same = [incident for incident in found.incidents if incident.kind == kind]
        hanging = [incident for incident in same if incident.path in found.hanging]
        is_overcome = all(incident.path in found.overcome for incident in same)
        last = [each for each in same if is_overcome or each.path not in found.overcome]
        newest = (hanging or last)[-1]
        if AFTER_FIRST in newest.headline:
            causes = (FIRST_TO_FAIL, FAILED)
            first = [each for each in last if any(cause in each.headline for cause in causes)]
            newest = (first or last)[-1]
        if AFTER_FIRST not in newest.headline:  # ranks that the launcher ended are no such reports
            same = [incident for incident in same if AFTER_FIRST not in incident.headline]
        more = f" ({len(same)} such reports)" if len(same) > 1 else ""
        file = f" File: {newest.path}." if newest.path.endswith(".txt") else ""
        yield Finding(
            severity="critical" if hanging or (kind in end_kinds and ended) else "warning",
            name=kind,
            sentence=f"{_sentence(newest.headline)}{more}{' The run trained on.' * is_overcome}",
            advice=f"{_incident_advice(newest)}{file}",
        )
    left = [rank for rank, reason in found.end_reasons.items() if reason == "completed"]
    if found.status == "peer_failed" and left and not end_kinds:
        yield Finding(
            severity="critical",
            name="left_early",
            sentence=f"Rank{'s' * (len(left) > 1)} {number_ranges(left)} ended in good order while "
            "other ranks still trained, which failed in a collective.",
            advice="Look at why the script ended there: sys.exit, or fewer batches than on the "
            "other ranks.",
        )
    elif found.status in ("exception", "peer_failed") and not end_kinds:
        yield Finding(
            severity="critical",
            name="exception",
            sentence="The run ended by an exception"
            + (" of another rank." if found.status == "peer_failed" else "."),
            advice="Look at the end of the job's own log.",
        )
    if found.facts.attempts > 1:
        yield Finding(
            severity="warning",
            name="restarts",
            sentence=f"The run was restarted {found.facts.attempts - 1} time(s).",
            advice="Look at the reports of the earlier attempts, and at the job's log.",
        )


def _loss_findings(found: _Evidence) -> Iterator[Finding]:
    if count := found.figure("nonfinite_losses"):
        thinned = _num_thinned(found.run)
        extent = f"at least {count:.0f} recorded step(s)" if thinned else f"{count:.0f} step(s)"
        first, is_of_all = _first_nonfinite(found.run.ranks.values())
        # The gradients of one rank make the losses of all ranks nan in the next step.
        hint = (
            " All ranks that record each step begin together: the batch may be one of an earlier "
            f"step on one of the {thinned} ranks that record each tenth step."
        )
        yield Finding(
            severity="critical",
            name="nonfinite_losses",
            sentence=f"The loss was nan or inf in {extent}{first}.",
            advice=f"Look at the batch of the first such step, or lower the learning rate."
            f"{hint if thinned and is_of_all else ''}",
        )
    if (ratio := found.figure("skipped_ratio")) > found.limit(SKIPPED_RATIO_HIGH):
        yield Finding(
            severity="critical",
            name="skipped_steps",
            sentence=f"{percent(ratio)} of the steps were skipped by gradient overflow.",
            advice="Train in bf16, or look for the cause of the overflows.",
        )


def _first_nonfinite(ranks: Collection[RankSteps]) -> tuple[str, bool]:
    """Return the first step whose loss was not finite, and its ranks, as text.

    And whether it is the first one of all ranks that record each step.

    Ranks make a step together, but their clocks differ. So of the steps that ended at about the
    same time, the one with the lowest number is the first. It is a range if a rank that records
    every tenth step is the first.
    """
    firsts: list[tuple[int, float, int, RankSteps]] = []
    for steps in ranks:
        bad = np.flatnonzero(steps.column("nonfinite_loss") > 0)
        if bad.size:
            row, step, ended_at = int(bad[0]), steps.column("step"), steps.column("ended_at")
            firsts.append((int(step[row]), float(ended_at[row]), row, steps))
    if not firsts:
        return "", False
    latest = min(ended_at for _, ended_at, _, _ in firsts) + MAX_LAG_SECONDS
    early = [(step, row, steps) for step, ended_at, row, steps in firsts if ended_at <= latest]
    first = min(step for step, _, _ in early)
    rows = [(row, steps) for step, row, steps in early if step == first]
    same = [(steps.first_possible_step(row), steps) for row, steps in rows]
    exact = [(begin, steps) for begin, steps in same if begin == first]
    # An elastic job may have had more ranks before, and may have more later.
    world_size = max(int(steps.column("world_size")[row]) for row, steps in rows)
    full_ranks = {
        steps.rank for steps in ranks if steps.rank < world_size and not steps.was_thinned
    }
    is_of_all = bool(full_ranks) and full_ranks <= {steps.rank for _, steps in exact}
    same = exact if is_of_all else same
    begin, size = min(begin for begin, _ in same), same[0][1].steps_per_row
    where = f"step {first:,}" if begin == first else f"steps {begin:,} to {first:,}"
    if size > 1:
        where = f"the {size} recorded steps up to step {first:,}"
    who = f"rank{'s' * (len(same) > 1)} {number_ranges([steps.rank for _, steps in same])}"
    if who.count(",") >= MAX_RANGES:  # as the one rank per node that records each step
        who = f"{len(same)} of the ranks that recorded it, such as rank {same[0][1].rank}"
    return f", first in {where} on {who}", is_of_all


def _data_findings(found: _Evidence) -> Iterator[Finding]:
    if found.figure("same_losses"):
        yield Finding(
            severity="warning",
            name="same_losses",
            sentence="The losses of all ranks were equal to the last digit, so the ranks were "
            "probably fed the same samples.",
            advice="Give each rank its own part of the data, such as by DistributedSampler. Ignore "
            "this if the loss is that of all ranks together, as a contrastive loss over gathered "
            "features, or in a test that trains on one batch.",
        )


def _communication_findings(found: _Evidence) -> Iterator[Finding]:
    figures = found.figures
    exposed = found.figure("comm_exposed_ratio")
    coverage = figures["comm_coverage_ratio"]
    if coverage is not None and coverage < found.limit(COMM_COVERAGE_LOW):
        yield Finding(
            severity="warning",
            name="comm_coverage",
            sentence=f"Only {percent(coverage)} of the collectives were recorded, so communication "
            "takes more time than shown.",
            advice="Calls of DDP and DeepCompile, compiled collectives, and torch's isend and "
            "irecv are not recorded; with a DeepSpeed engine, nor are functional collectives.",
        )
    if exposed > found.limit(EXPOSED_COMM_RATIO_HIGH):
        causes = {cause: found.figure(f"{cause}_ratio") for cause in _CAUSE_TEXTS}
        main = max(causes, key=lambda cause: causes[cause])
        unknown = sum(share.ratio for share in found.causes if share.name == "unknown")
        cause, why = None, ""
        if unknown > causes[main] > 0:
            cause = "unknown"
            why = ", for the largest part because of calls whose wait was not measured"
        elif causes[main] > 0:
            cause = main
            extent = "mostly" if causes[main] > exposed / 2 else "for the largest part"
            why = f", {extent} because {_CAUSE_TEXTS[main]}"
        yield Finding(
            severity="warning",
            name="exposed_comm",
            sentence=f"Training waited for communication {percent(exposed)} of its time{why}.",
            advice=_advice_on_cause(cause, found),
            cost_ratio=exposed,
        )
    link = figures["link_bandwidth_ratio"]
    if link is not None and link < found.limit(LINK_BANDWIDTH_LOW):
        yield Finding(
            severity="warning",
            name="link_bandwidth",
            sentence=f"At the end, a link had {percent(link)} of the best bandwidth that it has "
            "sustained.",
            advice="Look for other traffic on the network, and at the links' error counters.",
        )
    slow = max(found.rows, key=lambda row: row.straggler_score or 0.0, default=None)
    if slow is not None and (slow.straggler_score or 0.0) > found.limit(STRAGGLER_SCORE_HIGH):
        score = slow.straggler_score or 0.0
        yield Finding(
            severity="warning",
            name="straggler",
            sentence=f"Rank {slow.rank} on {slow.host} was slower than the median rank in "
            f"{slow.straggler_phase}, by {percent(score)} of a step.",
            advice=_advice_on_straggler(slow.straggler_phase),
            cost_ratio=score,
        )


def _advice_on_straggler(phase: str | None) -> str:
    if phase == "data":
        return (
            "Look at the data loader of this rank: its workers, the storage that it reads from, "
            "and other jobs on its host."
        )
    return (
        "Compare its device's clock and temperature with the others, look for other jobs on its "
        "host, and compare the lengths of its samples."
    )


# Only what DistributedDataParallel and fully_shard have.
_ADVICE_WITHOUT_DEEPSPEED = {
    "imbalance": (
        "Look at the slowest rank in the table of ranks. If batches differ in length, sort or pack "
        "them."
    ),
    "latency": (
        "Send fewer, larger messages: a larger bucket_cap_mb of DistributedDataParallel, or "
        "fully_shard on larger modules. Larger micro-batches need fewer messages per sample."
    ),
    "bandwidth": (
        "Send less: larger micro-batches with fewer accumulation steps. DistributedDataParallel "
        "compresses gradients by register_comm_hook. fully_shard sends less with "
        "reshard_after_forward=False if memory allows."
    ),
}


def _advice_on_cause(cause: str | None, found: _Evidence) -> str:
    stage = found.facts.info.get("zero_stage", "")
    if stage == _WITHOUT_DEEPSPEED and cause in _ADVICE_WITHOUT_DEEPSPEED:
        return _ADVICE_WITHOUT_DEEPSPEED[cause]
    if cause == "imbalance" and found.figure("pipeline_bubble_ratio"):
        return (
            "Give the pipeline more micro-batches per step (gradient_accumulation_steps), and its "
            "stages equal work (partition_method)."
        )
    if cause == "imbalance":
        return (
            "Look at the slowest rank in the table of ranks. If batches differ in length, sort or "
            "pack them, or let TrainingRun(balance=True) divide them."
        )
    if cause == "latency":
        return "Send fewer, larger messages: a larger reduce_bucket_size or allgather_bucket_size."
    if cause == "redundancy":
        volume = found.figures["comm_volume_ratio"]
        times = "" if volume is None else f" It sends {volume:.1f} times the reference."
        return f"`zerowatch estimate` shows what sends more than the ZeRO stage needs.{times}"
    if cause == "bandwidth":
        less = "a lower ZeRO stage if memory allows, " if stage == "3" else ""
        return (
            f"Send less: larger micro-batches with fewer accumulation steps, {less}or gradient "
            "compression. overlap_comm hides more of it behind backward."
        )
    if cause == "unknown":
        return (
            "Look at the problems of this report first: a rank may have trained on without "
            "monitoring. Otherwise nothing could time these calls; the table of causes has what is "
            "known of the rest."
        )
    if found.has_metrics:
        return (
            "The causes are not known: the ranks had not compared their collectives yet when the "
            "last metrics were logged (cross_rank.interval_seconds)."
        )
    return "The causes were not recorded; run with run_log.metrics_interval_seconds above 0."


def _less_memory(device: DeviceMemory) -> str:
    """Return what to do against the largest part of the memory, except for the baseline."""
    largest = next((name for name in device.categories if name != "baseline"), None)
    if largest == "other":
        return (
            "Most of it is held by the script, not by the engine (category other): look for "
            "losses, outputs or batches that are kept. memory.trace_leaks finds the lines."
        )
    return "Use smaller micro-batches or activation checkpointing."


def _memory_findings(found: _Evidence) -> Iterator[Finding]:
    at_end = found.run.ranks_at_end
    for kind in dict.fromkeys(each.kind for each in found.memories):
        ranks = [each for each in found.memories if each.kind == kind]
        if left := [each for each in ranks if each.rank in at_end]:
            yield from _limit_findings(left, found)
        leaks = [each for each in ranks if each.leak_bytes_per_step]
        if leaks:
            worst = max(leaks, key=lambda each: sum(each.leak_bytes_per_step.values()))
            growth = worst.leak_bytes_per_step
            others = len(leaks) - 1
            more = f", and on {others} more rank{'s' * (others > 1)}" if others else ""
            yield Finding(
                severity="warning",
                name="memory_leak",
                sentence=f"Memory of {_place(worst)} grew by {format_bytes(sum(growth.values()))} "
                "per step without larger batches "
                f"(category {max(growth, key=lambda category: growth[category])}){more}.",
                advice="Run with memory.trace_leaks to find the lines that allocate it.",
            )


def _limit_findings(ranks: Sequence[DeviceMemory], found: _Evidence) -> Iterator[Finding]:
    """Yield how near the ranks are to the limit of a kind of device."""
    riskiest = max(ranks, key=lambda each: each.risk_ratio or 0.0)
    known = [(each.headroom_ratio, each) for each in ranks if each.headroom_ratio is not None]
    headroom, tightest = min(known, key=lambda pair: pair[0], default=(None, riskiest))
    if (riskiest.risk_ratio or 0.0) >= found.limit(OOM_RISK_HIGH):
        yield Finding(
            severity="warning",
            name="oom_risk",
            sentence=f"At the end, {_place(riskiest)} had a probability of "
            f"{percent(riskiest.risk_ratio)} to run out of memory within 50 steps.",
            advice=_less_memory(riskiest),
        )
    elif headroom is not None and headroom < MEMORY_HEADROOM_LOW:
        yield Finding(
            severity="warning",
            name="memory_headroom",
            sentence=f"Only {percent(headroom)} of the memory of {_place(tightest)} is free at the "
            "peak.",
            advice="A longer batch may not fit: use smaller micro-batches, or sort by length.",
        )
    elif headroom is not None and headroom > MEMORY_HEADROOM_IDLE and tightest.kind != "cpu":
        yield Finding(
            severity="info",
            name="memory_idle",
            sentence=f"{percent(headroom)} of the memory of {_place(tightest)} was never used.",
            advice="Larger micro-batches, or less sharding and checkpointing, may be faster.",
        )


def _place(memory: DeviceMemory) -> str:
    return f"{memory.device} of rank {memory.rank}"


def _advice_on_data(found: _Evidence) -> str:
    reports = [each.headline for each in found.incidents if each.kind == "out_of_memory"]
    if any(_HOST_MEMORY.search(headline) for headline in reports):
        return (
            "The host ran out of memory, so do not add workers or prefetch more: store the data "
            "preprocessed, or make each sample cheaper to load."
        )
    return (
        "Give the DataLoader more workers or a larger prefetch_factor, or store the data "
        "preprocessed."
    )


def _time_findings(found: _Evidence) -> Iterator[Finding]:
    data = found.figure("data_ratio")
    if data > found.limit(DATA_RATIO_HIGH):
        yield Finding(
            severity="warning",
            name="data",
            sentence=f"Training waited for data {percent(data)} of its time.",
            advice=_advice_on_data(found),
            cost_ratio=data,
        )
    if (saved := found.figure("checkpoint_ratio")) > CHECKPOINT_RATIO_HIGH:
        yield Finding(
            severity="warning",
            name="checkpoints",
            sentence=f"Checkpoints and rebuilds took {percent(saved)} of the wall time.",
            advice="Save less often, or to a faster file system.",
            cost_ratio=saved,
        )
    if (other := _own_other_ratio(found)) > OTHER_RATIO_HIGH:
        yield Finding(
            severity="info",
            name="other",
            sentence=f"Training spent {percent(other)} of its time outside of the model, the "
            "optimizer and the data loader.",
            advice="Look at what the script does between the passes: callbacks, logging, metrics, "
            "batches that no DataLoader makes.",
            cost_ratio=other,
        )
    median, slow = found.figures["step_seconds_p50"], found.figures["step_seconds_p99"]
    are_enough = found.figure("steps") >= STEPS_OF_A_HUNDREDTH
    if are_enough and median is not None and slow is not None and slow > STALL_FACTOR * median > 0:
        yield Finding(
            severity="info",
            name="stalls",
            sentence=f"The slowest hundredth of the steps took {slow / median:.1f} times the "
            "median or more.",
            advice="Look at the phases of these steps in the report's chart of step time: data "
            "loading, other jobs on the host, and garbage collection make single steps stall.",
        )


def _own_other_ratio(found: _Evidence) -> float:
    """Return the share of the phase `other` in training time, without waits for communication."""
    ranks = found.run.ranks.values()
    waited = sum(steps.total("comm_exposed.other") or 0.0 for steps in ranks)
    training_time = sum(_RankTime.of(steps).training for steps in ranks)
    return found.figure("other_ratio") - (_ratio(waited, training_time) or 0.0)


def _device_findings(found: _Evidence) -> Iterator[Finding]:
    busy = found.figures["device_utilization_ratio"]
    if busy is not None and busy < found.limit(DEVICE_UTILIZATION_LOW):
        yield Finding(
            severity="warning",
            name="device_idle",
            sentence=f"The GPUs were busy {percent(busy)} of the time.",
            advice="If neither communication nor data explains it, the host is too slow: larger "
            "micro-batches, fewer small operations, torch.compile.",
            cost_ratio=(1 - busy) / 2,  # part of it is inevitable
        )
    yield from _throttling(found)
    yield from _device_faults(found)
    yield from _link_errors(found)


def _throttling(found: _Evidence) -> Iterator[Finding]:
    hot = [
        each
        for each in _events_of(found, devices.DEVICE_THROTTLED_SECONDS)
        if each.per_second >= found.limit(THROTTLED_RATIO_HIGH)
    ]
    if hot:
        worst = max(hot, key=lambda each: each.per_second)
        # The clock may be lowered before the first step too.
        share = min(1.0, worst.per_second)
        yield Finding(
            severity="warning",
            name="device_events",
            sentence=f"The clock of {_place_of(worst)} was lowered {percent(share)} of the time "
            f"({worst.labels[0]}){_and_others(worst, hot, 'and that of')}.",
            advice="All ranks wait for the slowest GPU. Look at the cooling and the power of its "
            "node.",
            cost_ratio=share,
        )


def _device_faults(found: _Evidence) -> Iterator[Finding]:
    """Yield lost devices, faults of their memory, and XIDs, however few: none is usual."""
    for same in _present_and_past(_events_of(found, devices.DEVICE_LOST)):
        yield _drain_finding(
            same,
            f"The driver lost {_place_of(same[0])}{_and_others(same[0], same, 'and')}.",
            "Drain the node, and restart the run from its last checkpoint on another one.",
        )
    uncorrected = [
        each
        for each in _events_of(found, devices.DEVICE_ECC_ERRORS)
        if each.labels == ("uncorrected",)
    ]
    if uncorrected:
        worst = max(uncorrected, key=lambda each: each.count)
        yield Finding(
            severity="critical",
            name="device_events",
            sentence=f"Uncorrected memory errors (ECC) on {_place_of(worst)}: {worst.count:,.0f}"
            f"{_and_others(worst, uncorrected)}.",
            advice="The memory has lost data. Restart the run from a checkpoint before the error, "
            "and reset the GPU before it is used again.",
        )
    yield from _row_remaps(found)
    yield from _xids(found)


def _drain_finding(
    events: Sequence[_DeviceEvents], sentence: str, advice: str, meaning: str = ""
) -> Finding:
    """Return a fault after which a node is drained: a warning if the run has left it behind."""
    is_past = events[0].is_past
    return Finding(
        severity="warning" if is_past else "critical",
        name="device_events",
        sentence=f"{sentence}{_PAST_SENTENCE if is_past else ''}",
        advice=f"{meaning}{_PAST_ADVICE if is_past else advice}",
    )


def _present_and_past(events: Sequence[_DeviceEvents]) -> Iterator[list[_DeviceEvents]]:
    for is_past in (False, True):
        if same := [each for each in events if each.is_past is is_past]:
            yield same


def _row_remaps(found: _Evidence) -> Iterator[Finding]:
    """Yield the GPUs whose memory is worn out, and those that must be reset to replace a row."""
    remaps = _events_of(found, devices.DEVICE_ROW_REMAP)
    failed = [each for each in remaps if each.labels == ("failed",)]
    for same in _present_and_past(failed):
        yield _drain_finding(
            same,
            f"A faulty row of memory could not be replaced on {_place_of(same[0])}"
            f"{_and_others(same[0], same)}.",
            "Drain the node, and have the card replaced: further errors are likely.",
        )
    worn = {_place_of(each) for each in failed}
    pending = [
        each for each in remaps if each.labels == ("pending",) and _place_of(each) not in worn
    ]
    if pending:
        yield Finding(
            severity="warning",
            name="device_events",
            sentence="A faulty row of memory is replaced at the next reset on "
            f"{_place_of(pending[0])}{_and_others(pending[0], pending)}.",
            advice="Reset the GPU before it is used again; a new process does not reset it.",
        )


def _xids(found: _Evidence) -> Iterator[Finding]:
    for worst, same in _by_labels(_events_of(found, devices.DEVICE_XID_ERRORS)):
        (xid,) = worst.labels
        is_known = re.fullmatch("[0-9]{1,9}", xid)
        meaning = _sentence(describe(int(xid)) if is_known else "an unknown number")
        table = "The runbook has a table of XIDs."
        if xid not in DRAIN_XIDS:
            yield Finding(
                severity="warning",
                name="device_events",
                sentence=_xid_sentence(xid, worst, same),
                advice=f"{meaning} {table}",
            )
            continue
        for events in _present_and_past(same):
            worst = max(events, key=lambda each: each.count)
            yield _drain_finding(events, _xid_sentence(xid, worst, events), table, f"{meaning} ")


def _xid_sentence(xid: str, worst: _DeviceEvents, events: Sequence[_DeviceEvents]) -> str:
    return (
        f"XID {xid} on {_place_of(worst)}: {worst.count:,.0f} time{'s' * (worst.count != 1)}"
        f"{_and_others(worst, events)}."
    )


_LINKS = {"nvlink": "NVLink", "pcie": "PCIe link"}


def _link_errors(found: _Evidence) -> Iterator[Finding]:
    """Yield links with more errors than the alert allows, on the mean over the run."""

    def is_faulty(each: _DeviceEvents) -> bool:
        kind, link = each.labels
        if link == "pcie":
            return 60 * each.per_second > found.limit(PCIE_REPLAYS_HIGH)
        return kind != "crc" or each.per_second > found.limit(NVLINK_CRC_ERRORS_HIGH)

    faulty = [each for each in _events_of(found, devices.DEVICE_LINK_ERRORS) if is_faulty(each)]
    for worst, same in _by_labels(faulty):
        kind, link = worst.labels
        yield Finding(
            severity="warning",
            name="device_events",
            sentence=f"Errors ({kind}) on the {_LINKS.get(link, link)} of {_place_of(worst)}: "
            f"{worst.count:,.0f}{_and_others(worst, same)}.",
            advice="Data was sent again: results are right, and communication was slower. Check "
            "the link as the runbook says.",
        )


def _events_of(found: _Evidence, spec: MetricSpec) -> list[_DeviceEvents]:
    """Return the events of a metric that have all of its labels: a log may be damaged."""
    num_labels = len(spec.label_names) - 1  # without the device
    return [
        each
        for each in found.device_events
        if each.name == spec.name and len(each.labels) == num_labels
    ]


def _place_of(events: _DeviceEvents) -> str:
    return f"{events.device} of rank {events.rank} on {events.host}"


def _and_others(worst: _DeviceEvents, events: Iterable[_DeviceEvents], what: str = "and on") -> str:
    """Return on how many more devices there are such events."""
    more = len({_place_of(each) for each in events} - {_place_of(worst)})
    return f", {what} {more} more GPU{'s' * (more > 1)}" if more else ""


def _by_labels(
    events: Sequence[_DeviceEvents],
) -> Iterator[tuple[_DeviceEvents, list[_DeviceEvents]]]:
    """Yield the events with equal labels, with the highest count of them first."""
    for labels in dict.fromkeys(each.labels for each in events):
        same = [each for each in events if each.labels == labels]
        yield max(same, key=lambda each: each.count), same


def _advice_on_monitoring(found: _Evidence) -> str:
    every = found.run.setting("profile", "every_steps")
    if isinstance(every, int) and every > 0:
        return (
            f"Every step number {every} was profiled, which costs most: raise profile.every_steps."
        )
    if found.run.setting("process", "separate") is True:
        return (
            "This contains the CPU time of the monitoring process (process.separate), which delays "
            "no step where a core is free for it; the page of the report lists the parts."
        )
    return "Steps of a few milliseconds cost most; the page of the report lists the parts."


def _monitoring_findings(found: _Evidence) -> Iterator[Finding]:
    ratio = found.figure("monitoring_ratio")
    if ratio > found.limit(WATCH_RATIO_HIGH):
        yield Finding(
            severity="info",
            name="monitoring_cost",
            sentence=f"Monitoring took {percent(ratio)} of the ranks' time.",
            advice=_advice_on_monitoring(found),
            cost_ratio=ratio,
        )


def _steps(found: _Evidence) -> str:
    last, recorded = max(row.last_step for row in found.rows), found.figure("steps")
    if last > recorded:
        return f"{last:,} steps, of which {recorded:,.0f} are recorded"
    if last < recorded and found.facts.attempts > 1:
        return f"step {last:,}; {recorded:,.0f} steps are recorded, as restarts repeat some"
    return f"{recorded:,.0f} steps"


def _unknown_end(unclosed: Sequence[int]) -> str:
    sentence = "The folder does not show how the run ended"
    if unclosed:
        many = len(unclosed) > 1
        ranks = f"ranks {number_ranges(unclosed)} were" if many else f"rank {unclosed[0]} was"
        sentence += f": {ranks} killed, or {'are' if many else 'is'} active on another machine"
    return f"{sentence}. "


def _activity(found: _Evidence) -> str:
    """Return that the run is active, and how old its figures are (a hang, or a full disk)."""
    age = 0.0 if found.facts.ended is None else unix_seconds() - found.facts.ended
    if found.hanging:
        return f"The run hangs: its last recorded step ended {format_duration(age)} ago. "
    if age < SILENT_SECONDS:
        return "The run is active. "
    return f"The run is active, but its last recorded step ended {format_duration(age)} ago. "


def _verdict(found: _Evidence, findings: Sequence[Finding]) -> str:
    if not found.run.ranks:
        if findings:
            return f"No step was recorded. {findings[0].sentence}"
        return "No step was recorded, so nothing can be said about the run."
    while_hanging = ", while it hung" if found.hanging else ""
    end = {
        "running": _activity(found),
        "interrupted": f"Interrupted after {_steps(found)}{while_hanging}. ",
        "unknown": _unknown_end(found.run.unclosed),
    }.get(found.status, "")
    notable = [finding for finding in findings if finding.severity != "info"]
    if notable:
        return f"{end}{notable[0].sentence}"
    compute = sum(found.figure(f"{phase}_ratio") for phase in _COMPUTE)
    exposed = found.figures["comm_exposed_ratio"]
    waited = "" if exposed is None else f", communication was waited for {percent(exposed)}"
    generate = found.figure("generate_ratio")
    generated = f", generation {percent(generate)}" if generate else ""
    outside = found.figure("other_ratio")
    if outside > compute:
        return (
            f"{end}The phase other takes {percent(outside)} of the time: neither data loading nor "
            f"a pass. Forward, backward and optimizer take {percent(compute)}{generated}{waited}."
        )
    return (
        f"{end}Nothing holds this run back: forward, backward and optimizer take "
        f"{percent(compute)} of its time{generated}{waited}."
    )


def percent(ratio: float | None) -> str:
    """Return a ratio as a percentage, with a decimal below ten percent."""
    if ratio is None:
        return "-"
    if 0 < abs(ratio) < 0.0005:
        return "< 0.1 %"
    return f"{100 * ratio:.1f} %" if 0 < abs(ratio) < 0.0995 else f"{100 * ratio:.0f} %"


def _sentence(headline: str) -> str:
    text = headline.strip() or "A report without text"
    return f"{text[0].upper()}{text[1:]}" + ("" if text.endswith(".") else ".")
