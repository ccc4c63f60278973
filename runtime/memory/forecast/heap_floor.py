"""What a step takes, read from a heap that keeps freed memory: by what it gives back at times."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
# So many readings to either side show whether what was given back is taken again.
_SIDE = 16


def heap_floor(floors: Floats, peaks: Floats) -> float:
    """Return by how much the peaks stood above a floor between them, on both sides of it, at most.

    A heap can give back only what a step has freed, so a step takes this at least. What was freed
    for good, or leaked, has no such peak on one of the sides and does not count.

    Args:
        floors: In use before each step, in bytes.
        peaks: The most in use in each of these steps, in bytes.
    """
    if len(floors) < 2:
        return 0.0
    before, after = _highest(peaks[::-1])[::-1][:-1], _highest(peaks)[1:]
    return max(float((np.minimum(before, after) - floors[1:]).max()), 0.0)


def _highest(peaks: Floats) -> Floats:
    """Return the highest of each peak and those that follow it."""
    padded = np.concatenate((peaks, np.full(_SIDE - 1, -np.inf)))
    highest: Floats = np.lib.stride_tricks.sliding_window_view(padded, _SIDE).max(axis=1)
    return highest
