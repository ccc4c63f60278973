"""The peak of a step, as a function of its micro-batches and of what is in use before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .heap_floor import heap_floor
from .peak_features import TOO_SMALL_TO_SEE, Features, read_features
from .peak_regression import fit_branches
from .series import PeakPoint, Shape

MOST_POINTS = 256
LEAST_RISES = 4
# After a change so many are fitted for themselves; until then they shift what was fitted before.
LEAST_NEW_RISES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakModel:
    """Peak = what is in use before + a rise, which is the greater of two. All in bytes.

    The rise is either what every step takes, say the optimizer's buffers, or what the activations
    of the neediest micro-batch take: per sample, per token, and per pair of tokens where attention
    keeps its scores. An allocator that keeps freed memory (glibc's heap does, and RSS shows it)
    serves them from what it has: then they rise by less, the more is in use before.

    Attributes:
        least_rise: What a step takes at least.
        constant, per_sample, per_token, per_token_pair: What a micro-batch needs; none but the
            constant is negative, so a larger micro-batch never needs less.
        reused_ratio: The share of what is in use before that can serve a micro-batch: 0 on CUDA.
        usual_need: What the micro-batches have usually needed, for those of unknown shape.
    """

    least_rise: float
    constant: float
    per_sample: float
    per_token: float
    per_token_pair: float
    reused_ratio: float
    usual_need: float

    def predict(self, shapes: Sequence[Shape], floor_bytes: float) -> float:
        """Return the median peak of a step of these micro-batches that begins at `floor_bytes`.

        Takes a microsecond or two: the training thread asks, too.
        """
        need = max([self._need(shape) for shape in shapes]) if shapes else self.usual_need
        return floor_bytes + max(self.least_rise, need - self.reused_ratio * floor_bytes)

    def _need(self, shape: Shape) -> float:
        per_token = self.per_token + self.per_token_pair * shape.length
        per_sample = self.per_sample + per_token * shape.length
        return self.constant + per_sample * shape.samples


def fit_peaks(points: Sequence[PeakPoint]) -> PeakModel | None:
    """Fit the model to readings in the order of their steps; None where too few are known.

    Only the last MOST_POINTS rises count, the recent ones more. Takes less than a millisecond, and
    twice that after a change.
    """
    features = read_features(points[-MOST_POINTS - 1 :])
    if len(features.rises) < LEAST_RISES:
        return None
    precision = TOO_SMALL_TO_SEE * features.usual_peak + 1.0
    branches = fit_branches(features, precision=precision)
    if LEAST_NEW_RISES <= branches.changed < len(features.rises):
        branches = fit_branches(features.last(branches.changed), precision=precision)
    constant, per_sample, per_token, per_token_pair, reused = branches.coefficients.tolist()
    reused = min(reused, 1.0)
    if not per_token and features.of_one_shape:
        constant, per_token = _by_tokens(constant, features)
    shift = branches.drift + reused * features.reference_floor
    return PeakModel(
        least_rise=branches.least_rise,
        constant=constant + shift,
        per_sample=per_sample,
        per_token=per_token,
        per_token_pair=per_token_pair,
        reused_ratio=reused,
        usual_need=branches.usual_need + shift,
    )


def _by_tokens(constant: float, features: Features) -> tuple[float, float]:
    """Divide a constant into what stays and what the tokens of the only shape take.

    A heap that keeps freed memory hides that in most steps. What this shape needs stays the same.
    """
    tokens = float(features.columns[-1, 2])
    if not tokens:
        return constant, 0.0
    floors = features.floors
    taken = heap_floor(floors, floors + features.rises)
    return constant - taken, taken / tokens
