"""The largest micro-batch that is likely to fit, from the peaks of those that did. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SAFETY_RATIO = 0.95  # of the limit: a prediction is never exact


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakSample:
    """What was needed at most while micro-batches of a size ran.

    Attributes:
        samples: Of the largest one.
        length: Of the longest one.
        peak_bytes: Highest use.
    """

    samples: int
    length: int
    peak_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMeasurements:
    """What a rank knows of its memory: peaks so far, and its limit in bytes, None without one."""

    peaks: Sequence[PeakSample]
    limit_bytes: float | None


def smaller_size(
    failing: int, peaks: Sequence[PeakSample], limit_bytes: float | None
) -> int | None:
    """Return the size to try after one that ran out; None if that was a single sample.

    Peaks of two sizes or more give a line, and the largest size under the limit; else the half,
    rounded up. Never more than one sample less than what failed.
    """
    if failing <= 1:
        return None
    fitting = None if limit_bytes is None else largest_fitting(peaks, limit_bytes)
    if fitting is None or fitting >= failing:  # the line was wrong, as this size has shown
        return -(-failing // 2)
    return max(1, fitting)


def largest_fitting(peaks: Sequence[PeakSample], limit_bytes: float) -> int | None:
    """Return the largest size with a + b * size under the limit; None where no line can be drawn.

    The line is the least squares one, lifted to lie on or above every measured peak; 0 if not even
    one sample is expected to fit.
    """
    if len({peak.samples for peak in peaks}) < 2:
        return None
    sizes = np.array([peak.samples for peak in peaks], dtype=float)
    bytes_needed = np.array([peak.peak_bytes for peak in peaks], dtype=float)
    slope, intercept = np.polyfit(sizes, bytes_needed, 1)
    if slope <= 0:
        return None
    intercept += max(0.0, float((bytes_needed - (intercept + slope * sizes)).max()))
    return max(0, int((SAFETY_RATIO * limit_bytes - intercept) // slope))
