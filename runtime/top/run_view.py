"""Defines what the terminal shows of a run at one moment, as plain data.

A figure that is unknown is None. Ratios are of training time, which is without evaluation and
checkpoints, unless stated otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...metrics.thresholds import Severity

RankState = Literal["running", "ended", "no answer", "not read yet", "recorded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of training time: a phase, or a cause of exposed communication.

    Attributes:
        ratio: Share of training time; of evaluation and checkpoints the share of wall time.
        seconds_per_step: Mean over ranks and steps.
    """

    name: str
    ratio: float
    seconds_per_step: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryView:
    """Memory of the rank that is nearest to the limit of a kind of device.

    Attributes:
        device: The device and the rank, such as "cuda:0 rank 3".
        peak_bytes: The highest use; in a live run that of the last minute.
        limit_bytes: The limit.
        predicted_bytes: The predicted next peak.
        risk_ratio: Probability that a peak of the next 50 steps exceeds the limit.
        categories: Bytes at the peak by category, the largest first.
    """

    device: str
    peak_bytes: float | None
    limit_bytes: float | None
    predicted_bytes: float | None
    risk_ratio: float | None
    categories: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank.

    Attributes:
        node: The host or the value of the label `node`.
        state: Whether its values are those of now.
        note: Why there are none, if `state` is "no answer".
        age_seconds: Age of the values; None if there are none.
        steps: Its optimizer steps.
        step_seconds: Median of recent steps; of a recorded run the mean of all.
        wait_ratio: Waiting for later ranks in collectives, overlapped or not.
        memory_ratio: Peak over limit, the highest of its devices.
        risk_ratio: The highest of its devices.
        straggler_score: By what share of a step it is slower than the median rank, in the phase in
            which it is slowest.
    """

    rank: int
    node: str
    state: RankState
    note: str = ""
    age_seconds: float | None = None
    steps: int | None = None
    step_seconds: float | None = None
    exposed_ratio: float | None = None
    wait_ratio: float | None = None
    data_ratio: float | None = None
    memory_ratio: float | None = None
    risk_ratio: float | None = None
    utilization_ratio: float | None = None
    mfu_ratio: float | None = None
    straggler_score: float | None = None
    straggler_phase: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertView:
    """An alert, a problem that the ranks show, or a finding about a recorded run.

    Attributes:
        name: Name of the alert, or of the finding.
        text: What is wrong, with figures.
        is_pending: Whether an alert of Prometheus has not lasted long enough to fire.
    """

    severity: Severity
    name: str
    text: str
    is_pending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerView:
    """The tuner.

    Attributes:
        state: Its state or its mode; None if there is no tuner.
        symptoms: Strength of the symptoms it sees, the strongest first.
        knobs: Present values of knobs.
        decisions: Decisions as text, the last first; of a live run their number by verdict.
    """

    state: str | None = None
    symptoms: Mapping[str, float] = field(default_factory=dict)
    knobs: Mapping[str, str] = field(default_factory=dict)
    decisions: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment.

    Attributes:
        status: One word, such as "training", "completed" or "no answer".
        source: Where the figures are from: an address or a folder.
        is_live: Whether the figures are those of now. Else they are recorded.
        at: Unix time of the figures.
        period: What ratios and rates cover, such as "last 60 s" or "whole run".
        facts: Name and text of the figures in the first lines.
        phases: Phases of training, then evaluation and checkpoints, in their order in a step.
        exposed: All exposed communication; None if it is unknown.
        causes: Exposed communication by cause.
        memory: One row for each kind of device.
        ranks: All ranks, in order.
        alerts: Critical ones first.
        alerts_source: Where the alerts are from, such as "Prometheus" or "the ranks' own signals".
        verdict: The most important finding about a recorded run; else empty.
        notes: What is missing, or could not be read.
        straggler_threshold: Score from which a rank counts as a straggler.
    """

    run_id: str
    status: str
    source: str
    is_live: bool
    at: float
    period: str
    facts: Sequence[tuple[str, str]]
    phases: Sequence[Share]
    exposed: Share | None
    causes: Sequence[Share]
    memory: Sequence[MemoryView]
    ranks: Sequence[RankView]
    alerts: Sequence[AlertView]
    alerts_source: str
    tuner: TunerView
    straggler_threshold: float
    verdict: str = ""
    notes: Sequence[str] = ()
