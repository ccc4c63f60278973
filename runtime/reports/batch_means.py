"""Computes confidence intervals of the mean of autocorrelated values, such as step times.

Successive steps resemble each other, so the standard error of independent values would be too
small. It is estimated twice, and the larger estimate counts:

- Batch means (Conway 1963; Schmeiser 1982 on the number of batches): the means of successive
  batches depend on each other far less than the values. What is left is corrected as in ASAP3
  (Steiger et al. 2005): with the lag-1 autocorrelation r of the batch means, the variance of the
  mean is multiplied by (1 + r) / (1 - r), and the number of batches is divided by it.
- The same formula for the values themselves, as of a first-order autoregressive process.

Each r has the correction of its bias by Marriott and Pope (1954). There is no interval if the
values are worth fewer than MIN_INDEPENDENT independent ones: a slow drift within a run does not
show how far another run would drift.

Share of 95 % intervals that miss the true mean, of 1,500 simulated series each, with series without
an interval counted as hits, and in parentheses the share of series without an interval:

| lag-1 autocorrelation of steps | 80 steps | 200 steps | 1,000 steps |
|---|---|---|---|
| 0 | 2 % (0 %) | 2 % (0 %) | 2 % (0 %) |
| 0.5 | 3 % (2 %) | 2 % (0 %) | 3 % (0 %) |
| 0.9 | 5 % (83 %) | 3 % (30 %) | 3 % (1 %) |
| 0.98 | 2 % (97 %) | 3 % (94 %) | 4 % (32 %) |

Few stalls are not enough to show how often they occur: with stalls of 20 standard deviations in 2 %
of the steps, 16 % of the intervals of 80 steps miss the true mean, and 6 % of those of 200 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..tuner.policy.confidence import student_quantile

NUM_BATCHES = 16
MIN_VALUES = 4 * NUM_BATCHES
MIN_INDEPENDENT = 8
# With fewer degrees of freedom, an interval is too wide to be of use.
_MIN_FREEDOM = 2
_MAX_AUTOCORRELATION = 0.995


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanError:
    """The error of a mean.

    Attributes:
        standard_error: Standard deviation of the mean.
        freedom: Degrees of freedom of the standard error.
    """

    standard_error: float
    freedom: int

    def half_width(self, level: float) -> float:
        """Return half the width of the interval that misses the true mean with this probability."""
        return student_quantile(1 - level / 2, self.freedom) * self.standard_error


def mean_error(values: NDArray[np.float64]) -> MeanError | None:
    """Return the error of the mean of successive values.

    Args:
        values: The values in their order; all are known.

    Returns:
        The error. None if there are fewer than MIN_VALUES values, or if they vary so slowly that
        they do not show how precise their mean is.

    Examples:
        >>> noise = np.random.default_rng(0).normal(size=1000)
        >>> round(mean_error(noise).standard_error, 3)
        0.031
    """
    if len(values) < MIN_VALUES:
        return None
    size = len(values) // NUM_BATCHES
    # The oldest values are left out, so that all batches have the same size.
    batches = values[len(values) - size * NUM_BATCHES :].reshape(NUM_BATCHES, size).mean(axis=1)
    of_batches, of_values = _variance_and_number(batches), _variance_and_number(values)
    freedom = int(min(of_batches[1], of_values[1])) - 1
    if freedom < _MIN_FREEDOM or of_values[1] < MIN_INDEPENDENT:
        return None
    return MeanError(
        standard_error=float(np.sqrt(max(of_batches[0], of_values[0]))), freedom=freedom
    )


def _variance_and_number(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the variance of the mean, and how many independent values would have the same."""
    deviations = values - values.mean()
    squares = float(deviations @ deviations)
    if squares == 0:
        return 0.0, float(len(values))
    lag_1 = float(deviations[:-1] @ deviations[1:]) / squares
    lag_1 += (1 + 3 * lag_1) / len(values)
    lag_1 = min(max(lag_1, 0.0), _MAX_AUTOCORRELATION)
    independent = len(values) * (1 - lag_1) / (1 + lag_1)
    return squares / (len(values) - 1) / independent, independent
