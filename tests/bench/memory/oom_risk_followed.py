"""Follows generated runs with three forecasting rules, and counts the outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from bench.memory.oom_risk_rules import along_line, forecast, over_threshold
from bench.memory.oom_risk_runs import Run
from bench.memory.oom_risk_scores import Judged, false_alarms, judged, lead_steps, warned

Array = npt.NDArray[np.float64]
OURS, THRESHOLD, LINE = "our forecast", "92 % threshold", "straight line"
PER_STEPS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """One run with what each rule said of it, step by step."""

    run: Run
    truth: Judged
    batch_risk: Array
    risks: dict[str, Array]


def follow(run: Run) -> Followed:
    """Ask all rules about each step of a run."""
    ours = forecast(run)
    return Followed(
        run=run,
        truth=judged(run, ours.risk),
        batch_risk=ours.batch_risk,
        risks={OURS: ours.risk, THRESHOLD: over_threshold(run), LINE: along_line(run)},
    )


def pooled(followed: Sequence[Followed], rule: str) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return a rule's risks at all steps whose future is known, and whether the OOM came."""
    risks = np.concatenate([each.risks[rule][each.truth.known] for each in followed])
    return risks, np.concatenate([each.truth.comes[each.truth.known] for each in followed])


def false_alarms_per_10k(followed: Sequence[Followed], rule: str) -> tuple[int, float]:
    """Return the number of false alarms of a rule, and that per 10,000 safe steps."""
    count = sum(false_alarms(each.risks[rule], each.truth) for each in followed)
    safe = sum(int((each.truth.known & ~each.truth.comes).sum()) for each in followed)
    return count, count * PER_STEPS / safe


def leads(followed: Sequence[Followed], rule: str, kind: str) -> list[int]:
    """Return the steps from alarm to OOM, of the runs of this kind that grew out of memory."""
    return [
        lead_steps(each.run, each.risks[rule])
        for each in followed
        if each.run.kind == kind and each.run.cause == "growth"
    ]


def warnings(followed: Sequence[Followed], rule: str) -> list[bool]:
    """Return of each run that a long batch ended whether the rule knew, as that batch began."""
    return [
        warned(each.run, each.risks[rule], each.batch_risk * (rule == OURS))
        for each in followed
        if each.run.cause == "length"
    ]
