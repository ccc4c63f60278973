"""Detects memory leaks during a run, and finds the category of memory that grows.

A leak is growth that batch sizes do not explain. `find_leak` looks for steady growth in a series of
readings. `LeakMonitor` applies `find_leak` to the memory in use between steps, which does not
depend on the batch. It publishes the leaks, and starts `LeakTracer` (`leak_tracer.py`) to find the
allocation sites.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ...metrics.catalog import memory
from ...metrics.recorder import Recorder
from ..common.format_numbers import format_bytes
from .forecast.peak_readings import PeakPoint
from .forecast.trend import Trend, fit_line
from .leak_tracer import LeakTracer

logger = logging.getLogger(__name__)

Array = npt.NDArray[np.float64]
CategorySamples = deque[tuple[int, Mapping[str, float]]]

# Maximum readings kept for each device, time between checks, and maximum detailed samples kept.
MAX_POINTS = 512
CHECK_SECONDS = 10.0
MAX_CATEGORY_SAMPLES = 256

# Minimum readings of a leak. Growth over fewer readings may be a warm-up or a cache that fills.
MIN_READINGS = 160
# Minimum slope, in standard deviations.
MIN_SCORE = 5.0
# Minimum growth in bytes, relative to the level, and relative to the noise of single readings.
MIN_GROWTH_BYTES = float(32 << 20)
MIN_GROWTH_RATIO = 0.002
MIN_GROWTH_TO_NOISE_RATIO = 3.0
# Without a leak, the RSS of training creeps up in bursts, by some percent over hundreds of steps.
# The largest observed creep was 7 %. Growth below CREEP_RATIO of the level must be a straight line:
# it must exceed MIN_STRAIGHT_GROWTH_TO_NOISE_RATIO times the noise of single readings.
CREEP_RATIO = 0.1
MIN_STRAIGHT_GROWTH_TO_NOISE_RATIO = 20.0
# Maximum odds of one sudden step against a line.
MAX_STEPWISE_ODDS = 0.1
# Minimum growth of each third relative to an even share, and of the last third relative to the
# first third. If a third grows less, the growth has ended, or slows down as in a warm-up.
MIN_THIRD_TO_EVEN_RATIO = 0.4
MIN_LAST_TO_FIRST_THIRD_RATIO = 0.65
# Minimum growth of the lowest readings relative to the total growth. If the lowest readings grow
# less, only temporary memory has grown.
MIN_LOWEST_GROWTH_RATIO = 0.5
# Lower bound of the noise of single readings.
MIN_NOISE_BYTES = float(256 << 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leak:
    """The steady growth of a series. `since_step` is the first step of the linear part."""

    bytes_per_step: float
    since_step: int


def find_leak(steps: Sequence[int], sizes: Sequence[float]) -> Leak | None:
    """Return the leak at the end of a series, or None if there is no growth or a recent one.

    Args:
        steps: Step numbers, ascending.
        sizes: Bytes in use after each step.
    """
    if len(sizes) < MIN_READINGS:
        return None
    times, values = np.asarray(steps, dtype=float), np.asarray(sizes, dtype=float)
    length = len(values)
    while length >= MIN_READINGS:
        trend = fit_line(times[-length:], values[-length:], MIN_NOISE_BYTES)
        first = len(values) - length
        growth = trend.slope * (times[-1] - times[first])
        if _is_linear_growth(trend, growth) and _is_sustained(values, first, growth):
            return Leak(bytes_per_step=trend.slope, since_step=int(times[first]))
        length = length * 3 // 4
    return None


def _is_linear_growth(trend: Trend, growth: float) -> bool:
    """Return whether growth is linear, and too large to be noise or a warm-up."""
    min_growth = max(
        MIN_GROWTH_BYTES, MIN_GROWTH_RATIO * trend.level, MIN_GROWTH_TO_NOISE_RATIO * trend.noise
    )
    return (
        trend.slope > MIN_SCORE * trend.slope_deviation
        and growth > min_growth
        and (
            growth > CREEP_RATIO * trend.level
            or growth > MIN_STRAIGHT_GROWTH_TO_NOISE_RATIO * trend.noise
        )
        and trend.stepwise < MAX_STEPWISE_ODDS
    )


def _is_sustained(values: Array, first: int, growth: float) -> bool:
    """Return whether all parts of the stretch grew, and no earlier value was as high.

    If an earlier value was as high, memory was freed once, so it will probably be freed again.
    """
    stretch = values[first:]
    sixths = np.array_split(stretch, 6)
    ends = [float(np.median(part)) for part in sixths]
    thirds = np.diff(ends)[[0, 2, 4]]  # from one sixth to the next
    lowest = float(sixths[-1].min() - sixths[0].min())
    highest = float(values[:first].max()) if first else -np.inf
    return bool(
        thirds.min() > MIN_THIRD_TO_EVEN_RATIO * growth / 6
        and thirds[-1] > MIN_LAST_TO_FIRST_THIRD_RATIO * thirds[0]
        and lowest > MIN_LOWEST_GROWTH_RATIO * growth * 5 / 6
        and highest < ends[-1]
    )


@dataclass(slots=True)
class _DeviceState:
    """The recent readings of one device, and its current leak."""

    points: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    categories: CategorySamples = field(default_factory=lambda: deque(maxlen=MAX_CATEGORY_SAMPLES))
    leaking_category: str | None = None
    is_logged: bool = False
    growth_bytes_per_step: float | None = None


class LeakMonitor:
    """Finds, publishes and logs memory leaks on each device. Used on the watch thread."""

    def __init__(
        self,
        recorder: Recorder,
        rank: int,
        folder: Callable[[], Path | None],
        *,
        trace_sites: bool,
    ) -> None:
        """Create a monitor.

        Args:
            recorder: Receives the metric values.
            rank: This rank.
            folder: Returns the run folder, or None before it exists.
            trace_sites: Whether to trace allocations once a leak is found.
        """
        self._recorder = recorder
        self._devices: dict[str, _DeviceState] = {}
        self._check_due = 0.0
        self._tracer = LeakTracer(rank, folder) if trace_sites else None

    def add(self, points: Mapping[str, PeakPoint]) -> None:
        """Add the readings at the end of a step, by device.

        If the step is not after the last one, the training state was rolled back, e.g. to a
        checkpoint. The readings before are then discarded, because a slope needs ascending steps.
        """
        for device, point in points.items():
            state = self._devices.setdefault(device, _DeviceState())
            if state.points and point.step <= state.points[-1][0]:
                state.points.clear()
                state.categories.clear()
            state.points.append((point.step, point.between_steps_bytes))

    def add_categories(self, step: int, categories: Mapping[str, Mapping[str, float]]) -> None:
        """Add the categories of a step that was sampled in detail, by device."""
        for device, sizes in categories.items():
            samples = self._devices.setdefault(device, _DeviceState()).categories
            if samples and step <= samples[-1][0]:
                samples.clear()
            samples.append((step, sizes))

    def reset(self) -> None:
        """Discard all readings, because a new engine holds another amount of memory."""
        for state in self._devices.values():
            state.points.clear()
            state.categories.clear()

    def check(self) -> None:
        """Check all devices for leaks, if CHECK_SECONDS have passed since the last check."""
        now = time.monotonic()
        if self._tracer is not None:
            self._tracer.write_when_due()
        if now < self._check_due:
            return
        self._check_due = now + CHECK_SECONDS
        for device, state in self._devices.items():
            steps, floors = zip(*state.points, strict=True) if state.points else ((), ())
            self._publish(device, state, find_leak(steps, floors))

    def growth_bytes_per_step(self, device: str) -> float | None:
        """Return how fast the memory of a device grows, or None without a leak."""
        state = self._devices.get(device)
        return None if state is None else state.growth_bytes_per_step

    def restore(self, growth_bytes_per_step: Mapping[str, float | None]) -> None:
        """Take over the findings of another process, by device."""
        for device, growth in growth_bytes_per_step.items():
            self._devices.setdefault(device, _DeviceState()).growth_bytes_per_step = growth

    def close(self) -> None:
        """Write the findings of a running trace and stop the trace. Safe to call twice."""
        if self._tracer is not None:
            self._tracer.close()

    def _publish(self, device: str, state: _DeviceState, leak: Leak | None) -> None:
        category = None if leak is None else _growing_category(state.categories, leak.since_step)
        if state.leaking_category is not None and state.leaking_category != category:
            self._recorder.remove(memory.MEMORY_LEAK, device, state.leaking_category)
        if leak is not None and category is not None:
            self._recorder.set(memory.MEMORY_LEAK, leak.bytes_per_step, device, category)
            if not state.is_logged:
                state.is_logged = True
                self._warn(device, leak, category)
        elif state.leaking_category is not None:
            logger.info("memory of %s has stopped growing", device)
        state.leaking_category = category
        state.growth_bytes_per_step = None if leak is None else leak.bytes_per_step

    def _warn(self, device: str, leak: Leak, category: str) -> None:
        tracing = ""
        if self._tracer is not None and self._tracer.start(on_device=device != "cpu"):
            tracing = ". Tracing its allocation sites now"
        elif self._tracer is None and category == "other":
            tracing = ". Set memory.trace_leaks to trace its allocation sites"
        logger.warning(
            "possible memory leak on %s: +%s per step since step %d, not explained by batch sizes "
            "(category %s)%s",
            device,
            format_bytes(leak.bytes_per_step),
            leak.since_step,
            category,
            tracing,
        )


def _growing_category(samples: CategorySamples, since_step: int) -> str:
    """Return the category, other than activations, with the largest growth since a step."""
    since = [sizes for step, sizes in samples if step >= since_step]
    if len(since) < 2:
        return "other"
    first, last = since[0], since[-1]
    growths = {name: last[name] - first.get(name, 0.0) for name in last if name != "activations"}
    return max(growths, key=lambda name: growths[name], default="other")
