"""Counts observations in buckets whose bounds grow by the same factor, as OpenTelemetry defines.

The bucket with index i holds values above base**i, up to base**(i + 1). The base is 2**(2**-SCALE).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

# Eight buckets for each doubling, so that a bound is 9 % above the one below it. Durations from a
# nanosecond to 30 years need 480 buckets, and those of one metric rarely more than 100.
SCALE = 3


class ExponentialBuckets:
    """Counts of observations by the index of their bucket.

    Examples:
        >>> buckets = ExponentialBuckets()
        >>> buckets.observe(1.0)
        >>> buckets.observe(1.05)
        >>> buckets.freeze()
        {-1: 1, 0: 1}
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def observe(self, value: float) -> None:
        """Count an observation, unless it is not a positive finite number."""
        if 0 < value < math.inf:
            index = bucket_index(value)
            self._counts[index] = self._counts.get(index, 0) + 1

    def freeze(self) -> Mapping[int, int]:
        """Return a copy of the counts by index."""
        return dict(self._counts)


def bucket_index(value: float) -> int:
    """Return the index of the bucket of a positive number."""
    fraction, exponent = math.frexp(value)
    if fraction == 0.5:  # a power of two is the upper bound of its bucket; log2 may be inexact
        return ((exponent - 1) << SCALE) - 1
    return math.ceil(math.log2(value) * (1 << SCALE)) - 1
