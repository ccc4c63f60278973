"""Peak memory of a step as a function of its micro-batches and of the memory in use before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .peak_features import RESOLUTION_RATIO, Features, Floats, read_features
from .peak_regression import fit_branches
from .series import PeakPoint, Shape

MAX_RISES = 256
MIN_RISES = 4
# After a change, this many new readings are fitted separately; fewer only shift the old fit.
MIN_NEW_RISES = 24
# Readings on either side of a floor that show whether memory given back is allocated again.
_HEAP_WINDOW = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakModel:
    """Peak = floor + rise, where the rise is the larger of two terms. All in bytes.

    One term is common to all steps, such as the optimizer's buffers. The other is the activations
    of the largest micro-batch: per sample, per token, and per pair of tokens where attention keeps
    its scores. An allocator that keeps freed memory (as glibc's heap, visible in RSS) serves
    activations from it, so that the rise is smaller, the higher the floor.

    Attributes:
        min_rise: Rise common to all steps.
        constant, per_sample, per_token, per_token_pair: Need of a micro-batch; only the constant
            can be negative, so a larger micro-batch never needs less.
        reused_ratio: Share of the floor that can serve a micro-batch: 0 on CUDA.
        typical_need: Median need, used for micro-batches of unknown shape.
    """

    min_rise: float
    constant: float
    per_sample: float
    per_token: float
    per_token_pair: float
    reused_ratio: float
    typical_need: float

    def predict(self, shapes: Sequence[Shape], floor_bytes: float) -> float:
        """Return the median peak of a step of these micro-batches that starts at `floor_bytes`.

        Takes 1 to 2 us; also called on the training thread.
        """
        need = max([self._need(shape) for shape in shapes]) if shapes else self.typical_need
        return floor_bytes + max(self.min_rise, need - self.reused_ratio * floor_bytes)

    def _need(self, shape: Shape) -> float:
        per_token = self.per_token + self.per_token_pair * shape.length
        per_sample = self.per_sample + per_token * shape.length
        return self.constant + per_sample * shape.samples


def fit_peaks(points: Sequence[PeakPoint]) -> PeakModel | None:
    """Fit the model to readings in the order of their steps; return None if they are too few.

    Uses the last MAX_RISES rises, recent ones with more weight. Takes less than 1 ms, and twice
    that after a change.
    """
    features = read_features(points[-MAX_RISES - 1 :])
    if len(features.rises) < MIN_RISES:
        return None
    precision = RESOLUTION_RATIO * features.typical_peak + 1.0
    branches = fit_branches(features, precision=precision)
    if MIN_NEW_RISES <= branches.changed < len(features.rises):
        branches = fit_branches(features.last(branches.changed), precision=precision)
    constant, per_sample, per_token, per_token_pair, reused = branches.coefficients.tolist()
    reused = min(reused, 1.0)
    if not per_token and features.has_one_shape:
        constant, per_token = _attribute_to_tokens(constant, features)
    shift = branches.drift + reused * features.reference_floor
    return PeakModel(
        min_rise=branches.min_rise,
        constant=constant + shift,
        per_sample=per_sample,
        per_token=per_token,
        per_token_pair=per_token_pair,
        reused_ratio=reused,
        typical_need=branches.typical_need + shift,
    )


def heap_floor(floors: Floats, peaks: Floats) -> float:
    """Return the largest height of the peaks on both sides of a floor above that floor, in bytes.

    A heap that keeps freed memory can only return what a step has freed, so this is a lower bound
    of what a step allocates. Memory freed for good, or leaked, has no such peak on one side.

    Args:
        floors: [n] bytes in use before each step.
        peaks: [n] peak bytes of each step.
    """
    if len(floors) < 2:
        return 0.0
    before, after = _running_max(peaks[::-1])[::-1][:-1], _running_max(peaks)[1:]
    return max(float((np.minimum(before, after) - floors[1:]).max()), 0.0)


def _running_max(peaks: Floats) -> Floats:
    """Return the maximum of each peak and the `_HEAP_WINDOW` - 1 that follow it."""
    padded = np.concatenate((peaks, np.full(_HEAP_WINDOW - 1, -np.inf)))
    highest: Floats = np.lib.stride_tricks.sliding_window_view(padded, _HEAP_WINDOW).max(axis=1)
    return highest


def _attribute_to_tokens(constant: float, features: Features) -> tuple[float, float]:
    """Split a constant into a fixed part and a part per token, for readings of one shape.

    A heap that keeps freed memory hides the latter in most steps. The need of this shape is
    unchanged.
    """
    tokens = float(features.columns[-1, 2])
    if not tokens:
        return constant, 0.0
    floors = features.floors
    per_step = heap_floor(floors, floors + features.rises)
    return constant - per_step, per_step / tokens
