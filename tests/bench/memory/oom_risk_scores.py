"""Computes scores of forecasts: Brier score, reliability, false alarms, lead time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from bench.memory.oom_risk_rules import HORIZON
from bench.memory.oom_risk_runs import Run

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
ALARM, REARM = 0.5, 0.3
LEAD_STEPS = 20
RELIABILITY_EDGES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Outcomes that forecasts are compared with, step by step.

    Attributes:
        comes: Whether the run is out of memory within the next 50 steps.
        known: Whether the outcome is known: not in the last 50 steps of a run that ends well, nor
            before the first forecast, nor at the fatal step itself.
    """

    comes: Flags
    known: Flags


def judged(run: Run, risk: Array) -> Judged:
    """Return the outcome after each step."""
    steps = np.arange(len(run.shapes))
    if run.oom_step is None:
        comes = np.zeros(len(steps), dtype=bool)
        return Judged(comes=comes, known=~np.isnan(risk) & (steps < len(steps) - HORIZON))
    comes = steps >= run.oom_step - HORIZON
    return Judged(comes=comes, known=~np.isnan(risk) & (steps < run.oom_step))


def alarms(risk: Array) -> Flags:
    """Return whether the alarm is on: from over 0.5 until below 0.3."""
    on = np.zeros(len(risk), dtype=bool)
    state = False
    for step, value in enumerate(risk.tolist()):
        state = value > ALARM or (state and not value < REARM)
        on[step] = state
    return on


def false_alarms(risk: Array, truth: Judged) -> int:
    """Count upward crossings that no OOM follows within 50 steps."""
    on = alarms(np.nan_to_num(risk))
    raised = on & ~np.concatenate(([False], on[:-1]))
    return int((raised & truth.known & ~truth.comes).sum())


def lead_steps(run: Run, risk: Array) -> int:
    """Return for how many steps before the OOM the alarm was on without a break."""
    assert run.oom_step is not None
    before = alarms(np.nan_to_num(risk))[: run.oom_step]
    quiet = np.flatnonzero(~before)
    return int(run.oom_step - (quiet[-1] + 1 if len(quiet) else 0))


def warned(run: Run, risk: Array, batch_risk: Array) -> bool:
    """Return whether the forecast predicted the fatal batch before it ran."""
    assert run.oom_step is not None
    return bool(batch_risk[run.oom_step] > ALARM or risk[run.oom_step - 1] > ALARM)


def brier(risks: Array, comes: Flags) -> float:
    """Return the mean squared error of probabilities (Brier 1950)."""
    return float(((risks - comes) ** 2).mean())


def reliability(risks: Array, comes: Flags) -> str:
    """Return for each range of risk how often an out-of-memory error followed."""
    lines = ["risk          steps    mean risk   came"]
    for low, high in pairwise(RELIABILITY_EDGES):
        inside = (risks >= low) & ((risks < high) | (high == 1.0))
        if inside.any():
            said, came = risks[inside].mean(), comes[inside].mean()
            lines.append(f"{low:.2f} - {high:.2f}  {inside.sum():7d}   {said:9.3f}  {came:5.3f}")
    return "\n".join(lines)
