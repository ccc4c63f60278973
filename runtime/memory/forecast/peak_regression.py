"""A robust regression with two branches: max(what every step takes, what its shape explains).

Least absolute deviations by reweighting (Huber's weights with a small corner), coefficients not
below zero, and only as many as the readings bear out (the Bayesian information criterion, Schwarz
1978). Steps on the lower branch say nothing of the upper one and are left out of it, as in Powell's
censored least absolute deviations (1984), fitted by turns (Buchinsky 1994).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from .peak_features import Features, Floats, middle

ROUNDS = 6
CHANGED_RISES, FAR_SPREADS = 8, 4.0
HALF_LIFE_RISES = 96.0
# What a column must pay, as the criterion counts: 1, samples, tokens, token pairs, floor. Where two
# explain as much the dearer one loses: of one shape alone, tokens are taken for the cause, and of
# two lengths, tokens rather than their pairs. The floor is free: it is only asked where it matters.
_PRICES = np.array([2.1, 2.2, 2.0, 2.5, 0.0])
# A step that frees something first may need less than nothing for no tokens. That is rare, and
# wrongly assumed it flattens the curve: short lengths alone often look so if needs grow with
# length^2.
_PRICE_OF_A_DEBT = 8.0
_RIDGE = 1e-9  # for columns that are multiples of each other
_QUANTILES = (0.0, 0.05, 0.15, 0.3, 0.5, 0.7)
_LEAST_ON_A_BRANCH = 5
# Freed memory that is kept shows in steps that do not rise at all.
_LEAST_SHARE_WITHOUT_RISE = 0.1
_DRIFT_WINDOW, _DRIFT_MEMORY, _DRIFT_DOUBT = 12, 0.6, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Branches:
    """The lower branch is constant; the upper one a sum over the columns, and its late drift.

    Attributes:
        usual_need: The middle of the upper branch, whatever the floor.
        changed: How many of the last rises lie off the upper branch, all to one side and far: then
            the need has changed. 0 while there are fewer than CHANGED_RISES.
    """

    least_rise: float
    coefficients: Floats
    drift: float
    usual_need: float
    changed: int


class _Subsets:
    """Some of the sets of columns that may explain the rises, as masks."""

    def __init__(self, masks: list[tuple[float, ...]]) -> None:
        self.masks = np.array(masks)
        self.both = self.masks[:, :, None] * self.masks[:, None, :]
        self.left_out = np.eye(5) * (1 + _RIDGE - self.masks)[:, :, None]
        self.prices = self.masks @ _PRICES


_FOUR = list(itertools.product((0.0, 1.0), repeat=4))
# Where freed memory is reused, it is taken off the constant, which then may be negative.
_REUSING = _Subsets([(1.0, *rest) for rest in _FOUR])
_PLAIN = _Subsets([(*rest, 0.0) for rest in _FOUR[1:]])


def fit_branches(features: Features, *, precision: float) -> Branches:
    """Fit both branches; differences below `precision` bytes are taken for noise."""
    rises = features.rises
    columns, scale = _scaled(features, precision)
    levels = np.sort(rises)[[int(q * (len(rises) - 1)) for q in _QUANTILES]]
    level = levels[1]
    upper = _or_all(rises > level + precision)
    weights = np.ones_like(rises)
    for turn in range(ROUNDS):
        recency = 0.5 ** (upper[::-1].cumsum()[::-1] / HALF_LIFE_RISES)
        coefficients = _best_subset(columns, rises, recency * upper * weights, precision)
        if turn < 2 and features.candidates is not None:
            columns = features.columns_of_neediest(coefficients / scale) / scale
        explained = columns @ coefficients
        losses = np.abs(rises - np.maximum(levels[:, None], explained)).sum(axis=1)
        level = levels[np.argmin(losses)]
        upper = _or_all(explained >= level)
        residuals = rises - explained
        spread = middle(np.abs(residuals[upper])) + precision / 20
        weights = 1.0 / np.maximum(np.abs(residuals) / spread, 0.5)
    places = np.flatnonzero(upper | (rises > level + precision))
    changed = _changed(residuals[places], max(FAR_SPREADS * spread, precision))
    return Branches(
        least_rise=float(level if upper.all() else middle(rises[~upper])),
        coefficients=coefficients / scale,
        drift=_drift(residuals[places], spread, changed),
        usual_need=middle(columns[:, :4] @ coefficients[:4]),
        changed=len(rises) - int(places[-changed]) if changed else 0,
    )


def _scaled(features: Features, precision: float) -> tuple[Floats, Floats]:
    """Return the columns scaled to about 1; those that tell nothing are zero."""
    columns = features.columns
    scale = np.abs(columns).max(axis=0)
    useless = np.ptp(columns, axis=0) == 0
    reuses = np.mean(features.rises < precision) >= _LEAST_SHARE_WITHOUT_RISE
    useless[0] = False
    if not reuses:
        useless[2] = not scale[2]
        useless[4] = True
    scale[useless] = np.inf
    return columns / scale, scale


def _best_subset(columns: Floats, rises: Floats, weights: Floats, precision: float) -> Floats:
    """Return the least squares coefficients of the subset of columns that is worth its price."""
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
    prices = subsets.prices if reuses else subsets.prices + _PRICE_OF_A_DEBT * (found[:, 0] < 0)
    worth = np.log(squares + (precision / 4) ** 2) + prices * np.log(count) / count
    worth[(found[:, 1:] < 0).any(axis=1)] = np.inf
    best: Floats = found[np.argmin(worth)]
    return best


def _changed(residuals: Floats, far: float) -> int:
    """Return how many of the last residuals are far, and all to one side, if they are many."""
    strange = np.abs(residuals) < far
    strange |= np.signbit(residuals) != np.signbit(residuals[-1:])
    run = int(np.argmax(strange[::-1])) if strange.any() else len(residuals)
    return run if run >= CHANGED_RISES else 0


def _drift(residuals: Floats, spread: float, changed: int) -> float:
    """Return by how much the last steps on the upper branch lay above it; cautiously, if few."""
    if changed:
        return middle(residuals[-changed:])
    late = np.clip(residuals[-_DRIFT_WINDOW:], -FAR_SPREADS * spread, FAR_SPREADS * spread)
    weights = _DRIFT_MEMORY ** np.arange(len(late))[::-1]
    return float((weights * late).sum() / (weights.sum() + _DRIFT_DOUBT))


def _or_all(chosen: np.ndarray) -> np.ndarray:
    return chosen if chosen.sum() >= _LEAST_ON_A_BRANCH else np.ones_like(chosen)
