"""A robust regression with two branches: max(rise common to all steps, rise explained by shape).

Least absolute deviations by reweighting (Huber's weights with a small corner), with coefficients
not below zero. The Bayesian information criterion (Schwarz 1978) selects their number. Steps on the
lower branch carry no information on the upper one and are excluded from it, as in Powell's censored
least absolute deviations (1984), fitted iteratively (Buchinsky 1994).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from .peak_features import Features, Floats, upper_median

ROUNDS = 6
CHANGED_RISES, FAR_SPREADS = 8, 4.0
HALF_LIFE_RISES = 96.0
# Penalty of each column in the criterion: 1, samples, tokens, token pairs, floor. Of two columns
# that explain the same, the one with the larger penalty is dropped: tokens for a single shape, and
# tokens rather than their pairs for two lengths. The floor is free: it is used only if it matters.
_PENALTIES = np.array([2.1, 2.2, 2.0, 2.5, 0.0])
# Penalty of a negative constant, which a step that first frees memory has. That is rare. Assumed
# wrongly it flattens the curve: short lengths alone often look so if needs grow with length^2.
_NEGATIVE_PENALTY = 8.0
_RIDGE = 1e-9  # for collinear columns
_QUANTILES = (0.0, 0.05, 0.15, 0.3, 0.5, 0.7)
_MIN_ON_A_BRANCH = 5
# Freed memory that the allocator keeps shows as steps without a rise.
_MIN_SHARE_WITHOUT_RISE = 0.1
_DRIFT_WINDOW, _DRIFT_MEMORY, _DRIFT_DOUBT = 12, 0.6, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """Fitted branches: the lower is a constant, the upper a sum over columns plus a recent drift.

    Attributes:
        typical_need: Median of the upper branch, without its floor term.
        changed: Number of last rises that all lie far off the upper branch, to one side: the need
            has changed. 0 below CHANGED_RISES.
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


_FOUR = list(itertools.product((0.0, 1.0), repeat=4))
# If freed memory is reused, it is subtracted from the constant, which may then be negative.
_REUSING = _Subsets([(1.0, *rest) for rest in _FOUR])
_PLAIN = _Subsets([(*rest, 0.0) for rest in _FOUR[1:]])


def fit_branches(features: Features, *, precision: float) -> Branches:
    """Fit both branches; differences below `precision` bytes count as noise."""
    rises = features.rises
    columns, scale = _scaled(features, precision)
    levels = np.sort(rises)[[int(q * (len(rises) - 1)) for q in _QUANTILES]]
    level = levels[1]
    upper = _all_if_few(rises > level + precision)
    weights = np.ones_like(rises)
    for iteration in range(ROUNDS):
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
    positions = np.flatnonzero(upper | (rises > level + precision))
    changed = _changed(residuals[positions], max(FAR_SPREADS * spread, precision))
    return Branches(
        min_rise=float(level if upper.all() else upper_median(rises[~upper])),
        coefficients=coefficients / scale,
        drift=_drift(residuals[positions], spread, changed),
        typical_need=upper_median(columns[:, :4] @ coefficients[:4]),
        changed=len(rises) - int(positions[-changed]) if changed else 0,
    )


def _scaled(features: Features, precision: float) -> tuple[Floats, Floats]:
    """Return the columns scaled to about 1; constant ones are zero."""
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
    """Return the least squares coefficients of the subset of columns with the best criterion."""
    total = weights.sum()
    weighted = columns * (weights / total)[:, None]
    gram, moments = weighted.T @ columns, weighted.T @ rises
    reuses = columns[:, 4].any()
    subsets = _REUSING if reuses else _PLAIN
    systems = gram * subsets.both + subsets.left_out
    found = np.linalg.solve(systems, (moments * subsets.masks)[..., None])[..., 0]
    fitted = ((found @ gram - 2 * moments) * found).sum(axis=1)
    squares = np.maximum((weights * rises * rises).sum() / total + fitted, 0.0)
    count = total**2 / (weights * weights).sum()
    penalties = (
        subsets.penalties if reuses else subsets.penalties + _NEGATIVE_PENALTY * (found[:, 0] < 0)
    )
    criterion = np.log(squares + (precision / 4) ** 2) + penalties * np.log(count) / count
    criterion[(found[:, 1:] < 0).any(axis=1)] = np.inf
    best: Floats = found[np.argmin(criterion)]
    return best


def _changed(residuals: Floats, far: float) -> int:
    """Return how many of the last residuals are far to one side; 0 below CHANGED_RISES."""
    interrupted = np.abs(residuals) < far
    interrupted |= np.signbit(residuals) != np.signbit(residuals[-1:])
    run = int(np.argmax(interrupted[::-1])) if interrupted.any() else len(residuals)
    return run if run >= CHANGED_RISES else 0


def _drift(residuals: Floats, spread: float, changed: int) -> float:
    """Return the mean recent residual of the upper branch, shrunk towards 0 if they are few."""
    if changed:
        return upper_median(residuals[-changed:])
    recent = np.clip(residuals[-_DRIFT_WINDOW:], -FAR_SPREADS * spread, FAR_SPREADS * spread)
    weights = _DRIFT_MEMORY ** np.arange(len(recent))[::-1]
    return float((weights * recent).sum() / (weights.sum() + _DRIFT_DOUBT))


def _all_if_few(chosen: np.ndarray) -> np.ndarray:
    return chosen if chosen.sum() >= _MIN_ON_A_BRANCH else np.ones_like(chosen)
