"""The micro-batches of late, as what each would need now; and those yet larger that may come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .peak_model import PeakModel
from .series import PeakPoint, Shape
from .trend import Trend

Array = npt.NDArray[np.float64]
# How far beyond the largest of N the next record lies, in mean excesses of the upper tenth; each of
# these is as likely.
_BEYOND = np.array((0.25, 0.75, 1.75))
_ALIKE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class RecentPeaks:
    """Predicted peaks of the last readings, had they begun at today's floor, in bytes.

    Attributes:
        peaks: One for each reading.
        largest: The micro-batches of the reading with the largest.
    """

    peaks: Array
    largest: tuple[Shape, ...]


def recent_batches(
    model: PeakModel, points: Sequence[PeakPoint], floor_bytes: float
) -> RecentPeaks:
    """Predict each reading anew; each kind only once, as there may be few."""
    known: dict[tuple[Shape, ...], float] = {}
    for point in points:
        if point.shapes not in known:
            known[point.shapes] = model.predict(point.shapes, floor_bytes)
    return RecentPeaks(
        peaks=np.array([known[point.shapes] for point in points]),
        largest=max(known, key=lambda shapes: known[shapes]),
    )


def brought_forward(steps: Array, peaks: Array, trend: Trend) -> Array:
    """Return what the batches on the line of a trend would need, were it their turn now."""
    stretch = slice(-trend.points, None)
    grown: Array = peaks[stretch] + trend.slope * (steps[-1] - steps[stretch])
    return grown


def with_larger(peaks: Array, floor_bytes: float) -> tuple[Array, Array]:
    """Return peaks that may come, and how likely each is: those seen, and some yet larger.

    A new largest of N + 1 comes with probability 1 / (N + 1), by symmetry. Where the largest came
    several times, lengths are capped or of a few kinds, and nothing larger is to be expected.
    """
    values, counts = np.unique(peaks, return_counts=True)
    total = len(peaks)
    alike = int(counts[values >= values[-1] - _ALIKE * (values[-1] - floor_bytes)].sum())
    record = 10.0 ** (1 - alike) / (total + 1)
    if len(values) < 4 or alike > 3:
        return values, counts / total
    upper = np.quantile(peaks, 0.9)
    excess = float((peaks[peaks >= upper] - upper).mean())
    larger = values[-1] + excess * _BEYOND
    shares = np.concatenate((counts / total * (1 - record), np.full(3, record / 3)))
    return np.concatenate((values, larger)), shares
