"""Estimates the latency and bandwidth of a group's link (alpha-beta model) from its calls."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import combinations
from statistics import median

# Maximum number of sizes that are kept. The least recently used size is dropped.
MAX_SIZES = 32
# Number of recent durations that are kept for each size.
DURATIONS_PER_SIZE = 64
# Two sizes are compared only if the larger size is at least this multiple of the smaller size.
# The slope between closer sizes would be the noise divided by a small difference.
MIN_SIZE_RATIO = 2.0
# Number of successive fits over which a bandwidth must last to count as sustained.
SUSTAINED_FITS = 3
# A call of at most this size is tiny: its bytes hardly change its duration. 16 KiB take 16 us at
# 1 GB/s, while a call takes some hundred microseconds.
TINY_BYTES = 16384
# Minimum number of tiny calls. With fewer calls, their median is not used as the latency.
MIN_TINY_CALLS = 5
# Number of recent tiny calls that are kept.
MAX_TINY_CALLS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The estimated link of a group, in terms of wire bytes.

    Attributes:
        latency: Seconds that a call without data takes.
        bandwidth: Bytes per second. None as long as larger calls do not take longer.
        largest_bytes: The largest size that was measured.
    """

    latency: float
    bandwidth: float | None
    largest_bytes: float

    def transfer_seconds(self, wire_bytes: float) -> float | None:
        """Return the duration of a collective whose members all arrive at the same time.

        The duration is None if the bandwidth is unknown and the size is far above all measured
        sizes.
        """
        if self.bandwidth:
            return self.latency + wire_bytes / self.bandwidth
        return None if wire_bytes > MIN_SIZE_RATIO * self.largest_bytes else self.latency


class LinkEstimate:
    """Fits duration = latency + wire bytes / bandwidth to the recent collectives of one group.

    Durations must not include waiting, so the caller adds the shortest duration over the ranks. The
    fit is a Theil-Sen estimate (Sen 1968, doi 10.1080/01621459.1968.10480934) over the median
    duration of each size. It is robust as long as at most a quarter of the sizes are outliers.
    Pairs of sizes are weighted by their distance. The latency is the median duration of tiny calls
    if there are enough of them, else the intercept of the fit.

    Attributes:
        best_bandwidth: The highest bandwidth sustained so far, in bytes per second. A bandwidth is
            sustained if SUSTAINED_FITS fits reached it. Only fits count in which the largest call
            spent most of its time moving data.
    """

    def __init__(self) -> None:
        self.best_bandwidth: float | None = None
        self._clear: deque[float] = deque(maxlen=SUSTAINED_FITS)
        self._durations: OrderedDict[int, deque[float]] = OrderedDict()
        self._tiny: deque[tuple[int, float]] = deque(maxlen=MAX_TINY_CALLS)  # bytes, seconds

    def add(self, wire_bytes: float, seconds: float) -> None:
        """Add a collective.

        Args:
            wire_bytes: Bytes that one rank sent.
            seconds: Duration of the collective, without waiting.
        """
        size = round(wire_bytes)
        if size <= TINY_BYTES:
            self._tiny.append((size, seconds))
        known = self._durations.get(size)
        if known is None:
            known = self._durations[size] = deque(maxlen=DURATIONS_PER_SIZE)
            if len(self._durations) > MAX_SIZES:
                self._durations.popitem(last=False)
        known.append(seconds)
        self._durations.move_to_end(size)

    def fit(self) -> Link | None:
        """Return the link fitted to the recent collectives; None before the first `add`."""
        points = [(size, median(seconds)) for size, seconds in self._durations.items()]
        if not points:
            return None
        slope, largest = _slope(points), max(self._durations)
        if slope is None:
            # There is only one size, or larger sizes do not take longer. Then the whole duration of
            # the smallest size counts as latency.
            latency = self._tiny_latency(0.0) or min(points)[1]
            return Link(latency=latency, bandwidth=None, largest_bytes=largest)
        latency = self._tiny_latency(slope) or _intercept(points, slope)
        # If the latency dominates even the largest call, the slope is mostly noise.
        if slope * largest > latency:
            self._clear.append(1 / slope)
            if len(self._clear) == SUSTAINED_FITS:
                self.best_bandwidth = max(self.best_bandwidth or 0.0, min(self._clear))
        return Link(latency=latency, bandwidth=1 / slope, largest_bytes=largest)

    def _tiny_latency(self, slope: float) -> float | None:
        tiny = [max(0.0, seconds - slope * size) for size, seconds in self._tiny]
        return median(tiny) if len(tiny) >= MIN_TINY_CALLS else None


def _intercept(points: list[tuple[int, float]], slope: float) -> float:
    """Return the seconds that a call takes besides moving its bytes.

    Only small calls are used if there are any. A call is small if moving its bytes takes less time
    than the rest of the call.
    """
    left = [seconds - slope * size for size, seconds in points]
    small = [rest for (size, _), rest in zip(points, left, strict=True) if slope * size < rest]
    return max(0.0, median(small or left))


def _slope(points: list[tuple[int, float]]) -> float | None:
    """Return the seconds per byte; None if larger sizes do not take longer.

    The result is the median slope over the pairs of sizes, weighted by the distance of each pair.
    """
    slopes = sorted(
        ((b[1] - a[1]) / (b[0] - a[0]), float(b[0] - a[0]))
        for a, b in combinations(sorted(points), 2)
        if b[0] >= MIN_SIZE_RATIO * max(a[0], 1)
    )
    half, seen = sum(weight for _, weight in slopes) / 2, 0.0
    for slope, weight in slopes:
        seen += weight
        if seen >= half:
            return slope if slope > 0 else None
    return None
