"""Decides on a change by other rules than the tuner's, on the same step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

SETTLE_STEPS = 2
# "20 steps before and 20 after, at least 5 %".
BEFORE_AFTER_STEPS, BEFORE_AFTER_GAIN = 20, 0.05
# Horovod scores a setting by the median of five samples of ten steps, and keeps the best.
SAMPLES, SAMPLE_STEPS = 5, 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The result of a rule.

    Attributes:
        accepted: Whether the rule keeps the change.
        gain: Gain in throughput that the rule reports.
        steps: Steps that the decision took.
    """

    accepted: bool
    gain: float
    steps: int


def before_after(gain: float, steps: Sequence[float]) -> Decided:
    """Compare the mean of some steps with that of as many before."""
    num = BEFORE_AFTER_STEPS
    before = fmean(steps[:num])
    after = fmean(steps[num + SETTLE_STEPS : 2 * num + SETTLE_STEPS]) / (1 + gain)
    measured = before / after - 1
    return Decided(
        accepted=measured > BEFORE_AFTER_GAIN, gain=measured, steps=2 * num + SETTLE_STEPS
    )


def best_of(gains: Sequence[float], steps: Sequence[float]) -> Decided:
    """Score the present setting, then one of each gain, and keep the highest score."""
    a_score = SAMPLES * SAMPLE_STEPS
    scores = [
        _score(gain, steps[index * a_score : (index + 1) * a_score])
        for index, gain in enumerate((0.0, *gains))
    ]
    best = max(scores)
    num_steps = len(scores) * a_score
    return Decided(accepted=best > scores[0], gain=best / scores[0] - 1, steps=num_steps)


def _score(gain: float, steps: Sequence[float]) -> float:
    return median(
        (1 + gain) / fmean(steps[start : start + SAMPLE_STEPS])
        for start in range(0, len(steps), SAMPLE_STEPS)
    )
