"""Detects memory leaks during a run: growth that no batch explains, its category and its sites."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...metrics.catalog import memory
from ...metrics.series import Recorder
from ..common.units import format_bytes
from .forecast.leak import Leak, find_leak
from .forecast.series import PeakPoint
from .leak_tracer import LeakTracer

logger = logging.getLogger(__name__)

MAX_POINTS = 512
CHECK_SECONDS = 10.0
MAX_CATEGORY_SAMPLES = 256
CategorySamples = deque[tuple[int, Mapping[str, float]]]


@dataclass(slots=True)
class _DeviceState:
    """Recent readings of one device, and its current leak."""

    points: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=MAX_POINTS))
    categories: CategorySamples = field(default_factory=lambda: deque(maxlen=MAX_CATEGORY_SAMPLES))
    leaking_category: str | None = None
    is_logged: bool = False
    growth_bytes_per_step: float | None = None


class LeakMonitor:
    """Checks for leaks on the watch thread."""

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
            folder: Returns the run folder; None while there is none.
            trace_sites: Whether to trace allocations once a leak is found.
        """
        self._recorder = recorder
        self._devices: dict[str, _DeviceState] = {}
        self._check_due = 0.0
        self._tracer = LeakTracer(rank, folder) if trace_sites else None

    def add(self, points: Mapping[str, PeakPoint]) -> None:
        """Add the readings at the end of a step, by device."""
        for device, point in points.items():
            state = self._devices.setdefault(device, _DeviceState())
            state.points.append((point.step, point.floor_bytes))

    def add_categories(self, step: int, categories: Mapping[str, Mapping[str, float]]) -> None:
        """Add the categories of a step that was sampled in detail, by device."""
        for device, sizes in categories.items():
            self._devices.setdefault(device, _DeviceState()).categories.append((step, sizes))

    def reset(self) -> None:
        """Discard all readings: the engine was replaced, and holds another amount of memory."""
        for state in self._devices.values():
            state.points.clear()
            state.categories.clear()

    def check(self) -> None:
        """Check for leaks, if due."""
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
        """Return the growth of a device's memory; None without a leak."""
        state = self._devices.get(device)
        return None if state is None else state.growth_bytes_per_step

    def close(self) -> None:
        """Write the findings of a running trace, and stop it. Safe to call twice."""
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
            tracing = ". Set memory.leak_sites to trace its allocation sites"
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
    """Return the category with the largest growth since a step, activations left out."""
    since = [sizes for step, sizes in samples if step >= since_step]
    if len(since) < 2:
        return "other"
    first, last = since[0], since[-1]
    growths = {name: last[name] - first.get(name, 0.0) for name in last if name != "activations"}
    return max(growths, key=lambda name: growths[name], default="other")
