"""Readings as the columns of a regression: what could explain by how much each step rose."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from .series import PeakPoint, Shape

Floats = npt.NDArray[np.float64]

# The kernel counts RSS in batches per thread, and allocators round: about so much of a peak.
TOO_SMALL_TO_SEE = 0.002
LEAST_KNOWN = 8
_UNKNOWN = (Shape(0, 0),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Rises over the floor before, and for each the five columns that may explain it.

    Attributes:
        rises: n rises in bytes.
        columns: (n, 5): 1, samples, tokens, token pairs, bytes by which the floor before was lower
            than `reference_floor`. Of several micro-batches those of the neediest.
        candidates: (n, most micro-batches, 5): the columns of each micro-batch; None where all
            points have one.
        reference_floor: The last floor.
        usual_peak: The median peak.
    """

    rises: Floats
    columns: Floats
    candidates: Floats | None
    reference_floor: float
    usual_peak: float

    @property
    def floors(self) -> Floats:
        """The n floors that the rises are over."""
        floors: Floats = self.reference_floor - self.columns[:, 4]
        return floors

    @property
    def of_one_shape(self) -> bool:
        """Whether all micro-batches are alike."""
        return self.candidates is None and not np.ptp(self.columns[:, 1:4], axis=0).any()

    def columns_of_neediest(self, coefficients: Floats) -> Floats:
        """Return the columns of the micro-batch that needs most by these coefficients."""
        if self.candidates is None:
            return self.columns
        neediest = np.argmax(self.candidates @ coefficients, axis=1)
        chosen: Floats = self.candidates[np.arange(len(neediest)), neediest]
        return chosen

    def last(self, count: int) -> Features:
        """Return those of the last `count` rises."""
        return replace(
            self,
            rises=self.rises[-count:],
            columns=self.columns[-count:],
            candidates=None if self.candidates is None else self.candidates[-count:],
        )


def read_features(points: Sequence[PeakPoint]) -> Features:
    """Lay out the readings of known shapes; where they are too few, all as if of none."""
    pairs = list(itertools.pairwise(points))
    known = [pair for pair in pairs if pair[1].shapes]
    if len(known) >= min(LEAST_KNOWN, len(pairs)):
        pairs = known
    shapes = [after.shapes if pairs is known else _UNKNOWN for _, after in pairs]
    levels = [(before.floor_bytes, after.peak_bytes) for before, after in pairs]
    floors, peaks = np.array(levels, dtype=float).reshape(-1, 2).T
    reference = points[-1].floor_bytes if points else 0.0
    candidates = _candidates(shapes, reference - floors)
    return Features(
        rises=np.maximum(peaks - floors, 0.0),  # the peak is read before the floor
        columns=candidates[:, 0],
        candidates=candidates if candidates.shape[1] > 1 else None,
        reference_floor=reference,
        usual_peak=middle(peaks) if pairs else 0.0,
    )


def _candidates(rows: Sequence[tuple[Shape, ...]], lower: Floats) -> Floats:
    """Return (n, k, 5): k = 1 where all points have one micro-batch, else the k that may matter."""
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
    columns[..., 4] = lower[:, None]
    return columns


def _largest(
    counts: npt.NDArray[np.intp], samples: Floats, lengths: Floats
) -> npt.NDArray[np.intp]:
    """Return, for each point, its micro-batches that are largest by one measure or another.

    First by what lies between tokens and token pairs: the best guess while no coefficient is known.
    """
    starts = np.cumsum(counts) - counts
    tokens = samples * lengths
    chosen = []
    for measure in (tokens * np.sqrt(lengths), tokens * lengths, tokens, samples):
        most = np.repeat(np.maximum.reduceat(measure, starts), counts)
        places = np.flatnonzero(measure == most)
        chosen.append(places[np.searchsorted(places, starts)])
    return np.stack(chosen, axis=1)


def middle(values: Floats) -> float:
    """Return the (upper) median; numpy's own takes ten times as long on so few."""
    return float(np.partition(values, len(values) // 2)[len(values) // 2])
