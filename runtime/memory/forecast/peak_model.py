"""Predicts the peak memory of a step from its micro-batches and the memory in use before it.

`read_features` converts the readings to regression columns, `fit_branches` fits the regression, and
`fit_peaks` returns the result as a `PeakModel`.

The floor of a step is the bytes in use between steps, and the rise is the peak minus the floor. The
regression has two branches, and the rise is the larger of the two. The lower branch is a constant
that is common to all steps. The upper branch is a sum over columns that describe the largest
micro-batch of the step.

The fit minimizes absolute deviations by reweighting (Huber's weights with a small corner), and
keeps coefficients at zero or above. The Bayesian information criterion (Schwarz 1978) selects the
columns. Steps on the lower branch contain no information about the upper branch, so they are
excluded from its fit, as in Powell's censored least absolute deviations (1984). This fit is
iterative (Buchinsky 1994).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ...common.gil_pauses import let_training_run
from .peak_readings import PeakPoint, Shape
from .trend import upper_median

Floats = npt.NDArray[np.float64]

# Resolution of a peak, relative to the peak. It is limited because the kernel counts RSS in batches
# per thread, and because allocators round sizes.
RESOLUTION_RATIO = 0.002
# If fewer readings than this have known shapes, readings with unknown shapes are used too.
MIN_KNOWN = 8
_UNKNOWN = (Shape(0, 0),)

# Maximum number of recent rises that are fitted, and the minimum number for a model.
MAX_RISES = 256
MIN_RISES = 4
# After a change, at least this many new readings are fitted separately. Fewer new readings only
# shift the old fit.
MIN_NEW_RISES = 24

# Number of iterations of the reweighted fit.
ROUNDS = 6
# The need has changed if at least this many of the last rises differ from the fit by at least this
# many spreads, all in the same direction.
CHANGED_RISES = 8
OUTLIER_SPREADS = 4.0
# A rise has half the weight of the last rise if it is this many rises older.
HALF_LIFE_RISES = 96.0
# Penalty of each column in the criterion, in this order: 1, samples, tokens, token pairs, floor. If
# two columns explain the rises equally well, the column with the larger penalty is dropped. For a
# single shape, tokens are used. For two lengths, tokens are used rather than token pairs. The floor
# has no penalty, as it is used only if it matters.
_PENALTIES = np.array([2.1, 2.2, 2.0, 2.5, 0.0])
# Penalty of a negative constant. The constant is rarely negative: only a step that first frees
# memory has a negative constant. A wrong negative constant flattens the curve: if the need grows
# with length^2, readings of short lengths alone often suggest a negative constant.
_NEGATIVE_PENALTY = 8.0
_RIDGE = 1e-9  # added to the normal equations, because columns may be collinear
# Quantiles of the rises that are tried as the level of the lower branch.
_QUANTILES = (0.0, 0.05, 0.15, 0.3, 0.5, 0.7)
# If a branch has fewer rises than this, it is fitted to the rises of both branches.
_MIN_ON_A_BRANCH = 5
# If the allocator keeps freed memory, some steps have no rise. The floor is a column only if at
# least this share of the steps has no rise.
_MIN_SHARE_WITHOUT_RISE = 0.1
# Estimate of the recent drift: the number of residuals that are averaged, the weight of each
# residual relative to the next residual, and the weight of a prior drift of zero.
_DRIFT_WINDOW = 12
_DRIFT_DECAY = 0.6
_DRIFT_PRIOR_WEIGHT = 0.5
# All subsets of four columns. The fifth column is the first or the last one.
_FOUR_COLUMN_MASKS = list(itertools.product((0.0, 1.0), repeat=4))
# Number of readings on each side of a floor. They show whether freed memory is allocated again.
_HEAP_WINDOW = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakModel:
    """Predicts a peak in bytes as floor plus rise, where the rise is the larger of two terms.

    The first term is common to all steps, such as the optimizer's buffers. The second term is the
    activations of the largest micro-batch. It grows with the number of samples and of tokens, and
    also with the number of token pairs if attention keeps its scores.

    Some allocators keep freed memory and use it for new activations. An example is glibc's heap,
    whose effect is visible in RSS. With such an allocator, a higher floor leads to a smaller rise.

    Attributes:
        min_rise: The rise that is common to all steps.
        constant, per_sample, per_token, per_token_pair: Coefficients of the need of a micro-batch.
            Only the constant can be negative, so a larger micro-batch never needs less memory.
        reused_ratio: Share of the floor that a micro-batch can reuse. 0 on CUDA.
        typical_need: The median need, which is used for micro-batches of unknown shape.
    """

    min_rise: float
    constant: float
    per_sample: float
    per_token: float
    per_token_pair: float
    reused_ratio: float
    typical_need: float

    def predict(self, shapes: Sequence[Shape], between_steps_bytes: float) -> float:
        """Return the median peak of a step that starts at `between_steps_bytes`.

        The call takes 1 to 2 us. The training thread also makes this call.
        """
        need = max([self._need(shape) for shape in shapes]) if shapes else self.typical_need
        return between_steps_bytes + max(
            self.min_rise, need - self.reused_ratio * between_steps_bytes
        )

    def _need(self, shape: Shape) -> float:
        per_token = self.per_token + self.per_token_pair * shape.length
        per_sample = self.per_sample + per_token * shape.length
        return self.constant + per_sample * shape.samples


def fit_peaks(points: Sequence[PeakPoint]) -> PeakModel | None:
    """Fit the model to readings in the order of their steps, or return None if too few.

    The fit uses the last MAX_RISES rises, and gives more weight to recent rises. It takes less than
    1 ms, and less than 2 ms after a change.
    """
    features = read_features(points[-MAX_RISES - 1 :])
    if len(features.rises) < MIN_RISES:
        return None
    let_training_run()
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
    """Return the largest height, in bytes, of the peaks on both sides of a floor above it.

    A heap that keeps freed memory can only return memory that a step has freed. The height is
    therefore a lower bound of the bytes that a step allocates. Memory that was freed for good, or
    that was leaked, has no such peak on one side.

    Args:
        floors: [n] bytes in use before each step.
        peaks: [n] peak bytes of each step.
    """
    if len(floors) < 2:
        return 0.0
    before, after = _running_max(peaks[::-1])[::-1][:-1], _running_max(peaks)[1:]
    return max(float((np.minimum(before, after) - floors[1:]).max()), 0.0)


def _running_max(peaks: Floats) -> Floats:
    """Return for each peak the maximum of this peak and the next `_HEAP_WINDOW` - 1 peaks."""
    padded = np.concatenate((peaks, np.full(_HEAP_WINDOW - 1, -np.inf)))
    highest: Floats = np.lib.stride_tricks.sliding_window_view(padded, _HEAP_WINDOW).max(axis=1)
    return highest


def _attribute_to_tokens(constant: float, features: Features) -> tuple[float, float]:
    """Split a constant into a fixed part and a part per token, for readings of one shape.

    A heap that keeps freed memory hides the part per token in most steps. The split does not change
    the need of this shape.
    """
    tokens = float(features.columns[-1, 2])
    if not tokens:
        return constant, 0.0
    floors = features.floors
    per_step = heap_floor(floors, floors + features.rises)
    return constant - per_step, per_step / tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """The input of the regression: the rise of each step, and five columns that explain it.

    Attributes:
        rises: [n] rises in bytes.
        columns: [n, 5]: 1, samples, tokens, token pairs, and `reference_floor` minus the floor
            before the step in bytes. If a step has several micro-batches, the columns describe the
            largest micro-batch.
        candidates: [n, micro-batches, 5]: the columns of each micro-batch. None if all points have
            one micro-batch.
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
        """The [n] floors in bytes: one floor for each step."""
        floors: Floats = self.reference_floor - self.columns[:, 4]
        return floors

    @property
    def has_one_shape(self) -> bool:
        """Whether all micro-batches have the same shape."""
        return self.candidates is None and not np.ptp(self.columns[:, 1:4], axis=0).any()

    def columns_of_largest(self, coefficients: Floats) -> Floats:
        """Return the columns of the micro-batch that needs most, for each step."""
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
    """Return the features of readings with known shapes, or of all readings if too few."""
    pairs = list(itertools.pairwise(points))
    known = [pair for pair in pairs if pair[1].shapes]
    if len(known) >= min(MIN_KNOWN, len(pairs)):
        pairs = known
    shapes = [after.shapes if pairs is known else _UNKNOWN for _, after in pairs]
    levels = [(before.between_steps_bytes, after.peak_bytes) for before, after in pairs]
    floors, peaks = np.array(levels, dtype=float).reshape(-1, 2).T
    reference = points[-1].between_steps_bytes if points else 0.0
    candidates = _candidate_columns(shapes, reference - floors)
    return Features(
        rises=np.maximum(peaks - floors, 0.0),  # a floor, read later, may be higher
        columns=candidates[:, 0],
        candidates=candidates if candidates.shape[1] > 1 else None,
        reference_floor=reference,
        typical_peak=upper_median(peaks) if pairs else 0.0,
    )


def _candidate_columns(rows: Sequence[tuple[Shape, ...]], floor_deficits: Floats) -> Floats:
    """Return columns of shape [n, k, 5]. If all points have one micro-batch, k is 1."""
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
    """Return, for each point, the largest micro-batch by each of four measures.

    The first measure lies between tokens and token pairs. It is the best guess before a fit.
    """
    starts = np.cumsum(counts) - counts
    tokens = samples * lengths
    chosen = []
    for measure in (tokens * np.sqrt(lengths), tokens * lengths, tokens, samples):
        most = np.repeat(np.maximum.reduceat(measure, starts), counts)
        positions = np.flatnonzero(measure == most)
        chosen.append(positions[np.searchsorted(positions, starts)])
    return np.stack(chosen, axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """The two fitted branches: the lower is a constant, the upper a sum of columns plus a drift.

    Attributes:
        typical_need: Median of the upper branch without the floor term.
        changed: Number of consecutive last rises that are all far above or all far below the upper
            branch, which means that the need has changed. 0 if there are fewer than CHANGED_RISES.
    """

    min_rise: float
    coefficients: Floats
    drift: float
    typical_need: float
    changed: int


class _Subsets:
    """Sets of columns that may explain the rises, as masks."""

    def __init__(self, masks: list[tuple[float, ...]]) -> None:
        self.masks = np.array(masks)
        self.both = self.masks[:, :, None] * self.masks[:, None, :]
        self.left_out = np.eye(5) * (1 + _RIDGE - self.masks)[:, :, None]
        self.penalties = self.masks @ _PENALTIES


# If freed memory is reused, it is subtracted from the constant, which may then be negative.
_REUSING = _Subsets([(1.0, *rest) for rest in _FOUR_COLUMN_MASKS])


_PLAIN = _Subsets([(*rest, 0.0) for rest in _FOUR_COLUMN_MASKS[1:]])


def fit_branches(features: Features, *, precision: float) -> Branches:
    """Fit both branches of the regression. Differences below `precision` bytes count as noise."""
    rises = features.rises
    columns, scale = _scaled(features, precision)
    levels = np.sort(rises)[[int(q * (len(rises) - 1)) for q in _QUANTILES]]
    level = levels[1]
    upper = _all_if_few(rises > level + precision)
    weights = np.ones_like(rises)
    for iteration in range(ROUNDS):
        let_training_run()
        recency = 0.5 ** (upper[::-1].cumsum()[::-1] / HALF_LIFE_RISES)
        coefficients = _best_subset(columns, rises, recency * upper * weights, precision)
        if iteration < 2 and features.candidates is not None:
            columns = features.columns_of_largest(coefficients / scale) / scale
        explained = columns @ coefficients
        losses = np.abs(rises - np.maximum(levels[:, None], explained)).sum(axis=1)
        level = levels[np.argmin(losses)]
        upper = _all_if_few(explained >= level)
        residuals = rises - explained
        spread = upper_median(np.abs(residuals[upper])) + precision / 20
        weights = 1.0 / np.maximum(np.abs(residuals) / spread, 0.5)
    let_training_run()
    positions = np.flatnonzero(upper | (rises > level + precision))
    changed = _changed(residuals[positions], max(OUTLIER_SPREADS * spread, precision))
    return Branches(
        min_rise=float(level if upper.all() else upper_median(rises[~upper])),
        coefficients=coefficients / scale,
        drift=_drift(residuals[positions], spread, changed),
        typical_need=upper_median(columns[:, :4] @ coefficients[:4]),
        changed=len(rises) - int(positions[-changed]) if changed else 0,
    )


def _scaled(features: Features, precision: float) -> tuple[Floats, Floats]:
    """Return the scaled columns and the scales. Constant columns are set to zero."""
    columns = features.columns
    scale = np.abs(columns).max(axis=0)
    dropped = np.ptp(columns, axis=0) == 0
    reuses = np.mean(features.rises < precision) >= _MIN_SHARE_WITHOUT_RISE
    dropped[0] = False
    if not reuses:
        dropped[2] = not scale[2]
        dropped[4] = True
    scale[dropped] = np.inf
    return columns / scale, scale


def _best_subset(columns: Floats, rises: Floats, weights: Floats, precision: float) -> Floats:
    """Return the least squares coefficients of the columns that the criterion selects."""
    total = weights.sum()
    weighted = columns * (weights / total)[:, None]
    gram, moments = weighted.T @ columns, weighted.T @ rises
    reuses = columns[:, 4].any()
    subsets = _REUSING if reuses else _PLAIN
    systems = gram * subsets.both + subsets.left_out
    coefficients = np.linalg.solve(systems, (moments * subsets.masks)[..., None])[..., 0]
    fitted = ((coefficients @ gram - 2 * moments) * coefficients).sum(axis=1)
    squares = np.maximum((weights * rises * rises).sum() / total + fitted, 0.0)
    count = total**2 / (weights * weights).sum()
    penalties = (
        subsets.penalties
        if reuses
        else subsets.penalties + _NEGATIVE_PENALTY * (coefficients[:, 0] < 0)
    )
    criterion = np.log(squares + (precision / 4) ** 2) + penalties * np.log(count) / count
    criterion[(coefficients[:, 1:] < 0).any(axis=1)] = np.inf
    best: Floats = coefficients[np.argmin(criterion)]
    return best


def _changed(residuals: Floats, far: float) -> int:
    """Return how many of the last residuals are far off on one side, or 0 below CHANGED_RISES."""
    interrupted = np.abs(residuals) < far
    interrupted |= np.signbit(residuals) != np.signbit(residuals[-1:])
    run = int(np.argmax(interrupted[::-1])) if interrupted.any() else len(residuals)
    return run if run >= CHANGED_RISES else 0


def _drift(residuals: Floats, spread: float, changed: int) -> float:
    """Return the mean recent residual of the upper branch. Few residuals shrink it towards 0."""
    if changed:
        return upper_median(residuals[-changed:])
    recent = np.clip(
        residuals[-_DRIFT_WINDOW:], -OUTLIER_SPREADS * spread, OUTLIER_SPREADS * spread
    )
    weights = _DRIFT_DECAY ** np.arange(len(recent))[::-1]
    return float((weights * recent).sum() / (weights.sum() + _DRIFT_PRIOR_WEIGHT))


def _all_if_few(chosen: np.ndarray) -> np.ndarray:
    return chosen if chosen.sum() >= _MIN_ON_A_BRANCH else np.ones_like(chosen)
