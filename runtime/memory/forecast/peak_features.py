"""Regression features: what may explain the rise of memory in each step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .series import PeakPoint, Shape

Floats = npt.NDArray[np.float64]

# Resolution of a peak: the kernel counts RSS in batches per thread, and allocators round.
RESOLUTION_RATIO = 0.002
MIN_KNOWN = 8
_UNKNOWN = (Shape(0, 0),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Rises of memory over the floor before each step, and the five columns that may explain them.

    Attributes:
        rises: [n] rises in bytes.
        columns: [n, 5]: 1, samples, tokens, token pairs, `reference_floor` minus the floor before
            in bytes. For a step of several micro-batches, those of the largest.
        candidates: [n, micro-batches, 5]: the columns of each micro-batch; None if all points have
            one.
        reference_floor: The last floor.
        typical_peak: The median peak.
    """

    rises: Floats
    columns: Floats
    candidates: Floats | None
    reference_floor: float
    typical_peak: float

    @property
    def floors(self) -> Floats:
        """The [n] floors before each step."""
        floors: Floats = self.reference_floor - self.columns[:, 4]
        return floors

    @property
    def has_one_shape(self) -> bool:
        """Whether all micro-batches have the same shape."""
        return self.candidates is None and not np.ptp(self.columns[:, 1:4], axis=0).any()

    def columns_of_largest(self, coefficients: Floats) -> Floats:
        """Return the columns of the micro-batch of each step that needs most, by coefficients."""
        if self.candidates is None:
            return self.columns
        largest = np.argmax(self.candidates @ coefficients, axis=1)
        chosen: Floats = self.candidates[np.arange(len(largest)), largest]
        return chosen

    def last(self, count: int) -> Features:
        """Return the features of the last `count` rises."""
        return replace(
            self,
            rises=self.rises[-count:],
            columns=self.columns[-count:],
            candidates=None if self.candidates is None else self.candidates[-count:],
        )


def read_features(points: Sequence[PeakPoint]) -> Features:
    """Build features of the readings with known shapes; of all readings, if these are too few."""
    pairs = list(itertools.pairwise(points))
    known = [pair for pair in pairs if pair[1].shapes]
    if len(known) >= min(MIN_KNOWN, len(pairs)):
        pairs = known
    shapes = [after.shapes if pairs is known else _UNKNOWN for _, after in pairs]
    levels = [(before.floor_bytes, after.peak_bytes) for before, after in pairs]
    floors, peaks = np.array(levels, dtype=float).reshape(-1, 2).T
    reference = points[-1].floor_bytes if points else 0.0
    candidates = _candidate_columns(shapes, reference - floors)
    return Features(
        rises=np.maximum(peaks - floors, 0.0),  # the peak is read before the floor
        columns=candidates[:, 0],
        candidates=candidates if candidates.shape[1] > 1 else None,
        reference_floor=reference,
        typical_peak=upper_median(peaks) if pairs else 0.0,
    )


def _candidate_columns(rows: Sequence[tuple[Shape, ...]], floor_deficits: Floats) -> Floats:
    """Return [n, k, 5]: k = 1 if all points have one micro-batch, else the candidates."""
    sizes = [(shape.samples, shape.length) for row in rows for shape in row]
    samples, lengths = np.array(sizes, dtype=float).reshape(-1, 2).T
    if len(sizes) == len(rows):
        samples, lengths = samples[:, None], lengths[:, None]
    else:
        chosen = _largest(np.array([len(row) for row in rows]), samples, lengths)
        samples, lengths = samples[chosen], lengths[chosen]
    columns = np.empty((*samples.shape, 5))
    columns[..., 0] = 1.0
    columns[..., 1] = samples
    columns[..., 2] = samples * lengths
    columns[..., 3] = columns[..., 2] * lengths
    columns[..., 4] = floor_deficits[:, None]
    return columns


def _largest(
    counts: npt.NDArray[np.intp], samples: Floats, lengths: Floats
) -> npt.NDArray[np.intp]:
    """Return, for each point, its micro-batches that are largest by each of four measures.

    The first measure lies between tokens and token pairs: the best guess before a fit.
    """
    starts = np.cumsum(counts) - counts
    tokens = samples * lengths
    chosen = []
    for measure in (tokens * np.sqrt(lengths), tokens * lengths, tokens, samples):
        most = np.repeat(np.maximum.reduceat(measure, starts), counts)
        positions = np.flatnonzero(measure == most)
        chosen.append(positions[np.searchsorted(positions, starts)])
    return np.stack(chosen, axis=1)


def upper_median(values: Floats) -> float:
    """Return the upper median; numpy.median takes ten times as long on short arrays."""
    return float(np.partition(values, len(values) // 2)[len(values) // 2])
