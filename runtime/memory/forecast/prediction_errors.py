"""By how much a model misses the readings it knows, and by how much those that come after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from .peak_model import PeakModel
from .series import PeakPoint

Array = npt.NDArray[np.float64]
KEPT = 192


class PredictionErrors:
    """The last readings by one model: what it said, and what came.

    Attributes:
        errors: What came minus what was said, in bytes, unusable memory included. What appeared in
            a step and then stayed is the floor's growth, and no error of the peak.
        rooms: What the limit then left beyond what was said, in bytes.
    """

    def __init__(self, model: PeakModel, points: Sequence[PeakPoint]) -> None:
        self.errors: deque[float] = deque(maxlen=KEPT)
        self.rooms: deque[float] = deque(maxlen=KEPT)
        self._model = model
        for before, point in pairwise(points[-KEPT - 1 :]):
            self.note(before, point)

    def note(self, before: PeakPoint, point: PeakPoint) -> float:
        """Take in a reading and the one before it; return the peak that was said, in bytes."""
        said = self._model.predict(point.shapes, before.floor_bytes)
        error = point.peak_bytes - said
        if error > 0 and point.floor_bytes > before.floor_bytes:
            since = point.peak_bytes - self._model.predict(point.shapes, point.floor_bytes)
            error = max(since, 0.0)
        error += point.unusable_bytes - before.unusable_bytes
        self.errors.append(error)
        needed = point.peak_bytes + point.unusable_bytes
        self.rooms.append(point.limit_bytes - needed + error)
        return said


def median_ratio(errors: Iterable[float]) -> float:
    """Return the median of these, or 0 of none."""
    known = list(errors)
    return float(np.median(known)) if known else 0.0
