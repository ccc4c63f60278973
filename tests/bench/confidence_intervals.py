"""Trimmed means, which outliers do not move, and their confidence intervals."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

TRIMMED_SHARE = 0.1
RESAMPLES = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with its 95 % confidence interval."""

    estimate: float
    low: float
    high: float


def ratio_interval(ratios: Sequence[float]) -> Interval:
    """Return the trimmed geometric mean of paired ratios, with a bootstrap interval over pairs."""
    of_logs = mean_interval([math.log(ratio) for ratio in ratios])
    return Interval(
        estimate=math.exp(of_logs.estimate),
        low=math.exp(of_logs.low),
        high=math.exp(of_logs.high),
    )


def mean_interval(values: Sequence[float]) -> Interval:
    """Return the trimmed mean of values, with a bootstrap interval."""
    picker, number = random.Random(0), len(values)
    resampled = sorted(trimmed_mean(picker.choices(values, k=number)) for _ in range(RESAMPLES))
    return Interval(
        estimate=trimmed_mean(values),
        low=resampled[round(0.025 * RESAMPLES)],
        high=resampled[round(0.975 * RESAMPLES) - 1],
    )


def trimmed_mean(values: Sequence[float]) -> float:
    """Return the mean without the lowest and highest tenth."""
    dropped = int(len(values) * TRIMMED_SHARE)
    kept = sorted(values)[dropped : len(values) - dropped]
    return sum(kept) / len(kept)
