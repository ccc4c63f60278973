"""Growth of memory that no batch explains: which category grows, and where it is allocated."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...metrics.catalog import memory
from ...metrics.recorder import Recorder
from ..common.units import format_bytes
from .forecast.leak import Leak, find_leak
from .forecast.series import PeakPoint
from .leak_tracer import LeakTracer

logger = logging.getLogger(__name__)

LOOKED_AT_POINTS = 512
RENEWAL_SECONDS = 10.0
KEPT_LOOKS = 256


@dataclass(slots=True)
class _Device:
    """What is kept of one device."""

    points: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=LOOKED_AT_POINTS))
    looks: deque[tuple[int, Mapping[str, float]]] = field(
        default_factory=lambda: deque(maxlen=KEPT_LOOKS)
    )
    category: str | None = None
    is_told: bool = False
    growth_bytes_per_step: float | None = None


class LeakMonitor:
    """Looks for leaks on the watch thread. `folder` gives the run folder, where there is one."""

    def __init__(
        self,
        recorder: Recorder,
        rank: int,
        folder: Callable[[], Path | None],
        *,
        trace_sites: bool,
    ) -> None:
        self._recorder = recorder
        self._devices: dict[str, _Device] = {}
        self._due = 0.0
        self._sites = LeakTracer(rank, folder) if trace_sites else None

    def add(self, points: Mapping[str, PeakPoint]) -> None:
        """Take the readings at the end of a step, by device."""
        for device, point in points.items():
            known = self._devices.setdefault(device, _Device())
            known.points.append((point.step, point.floor_bytes))

    def add_look(self, step: int, categories: Mapping[str, Mapping[str, float]]) -> None:
        """Take a step's categories, by device."""
        for device, sizes in categories.items():
            self._devices.setdefault(device, _Device()).looks.append((step, sizes))

    def begin_anew(self) -> None:
        """Forget what was read so far: the engine is another one, and holds another amount."""
        for known in self._devices.values():
            known.points.clear()
            known.looks.clear()

    def look(self) -> None:
        """Look for leaks anew, if that is due."""
        now = time.monotonic()
        if self._sites is not None:
            self._sites.write_when_due()
        if now < self._due:
            return
        self._due = now + RENEWAL_SECONDS
        for device, known in self._devices.items():
            steps, floors = zip(*known.points, strict=True) if known.points else ((), ())
            self._tell(device, known, find_leak(steps, floors))

    def growth(self, device: str) -> float | None:
        """Return the bytes per step by which a device's memory leaks; None while it does not."""
        known = self._devices.get(device)
        return None if known is None else known.growth_bytes_per_step

    def close(self) -> None:
        """Write what tracing has found so far, and end it. Safe to call twice."""
        if self._sites is not None:
            self._sites.close()

    def _tell(self, device: str, known: _Device, leak: Leak | None) -> None:
        category = None if leak is None else _growing(known.looks, leak.since_step)
        if known.category is not None and known.category != category:
            self._recorder.remove(memory.MEMORY_LEAK, device, known.category)
        if leak is not None and category is not None:
            self._recorder.set(memory.MEMORY_LEAK, leak.bytes_per_step, device, category)
            if not known.is_told:
                known.is_told = True
                self._warn(device, leak, category)
        elif known.category is not None:
            logger.info("memory of %s does not grow any more", device)
        known.category = category
        known.growth_bytes_per_step = None if leak is None else leak.bytes_per_step

    def _warn(self, device: str, leak: Leak, category: str) -> None:
        traced = ""
        if self._sites is not None and self._sites.start(on_cuda=device != "cpu"):
            traced = " Where it is allocated is traced now."
        elif self._sites is None and category == "other":
            traced = " Set memory.leak_sites to see where it is allocated."
        logger.warning(
            "memory of %s grows by %s a step since step %d, which no batch explains: something "
            "leaks, or a cache grows. It is counted as %s.%s",
            device,
            format_bytes(leak.bytes_per_step),
            leak.since_step,
            category,
            traced,
        )


def _growing(looks: deque[tuple[int, Mapping[str, float]]], since_step: int) -> str:
    """Return the category that grew most since a step; activations come and go with batches."""
    since = [sizes for step, sizes in looks if step >= since_step]
    if len(since) < 2:
        return "other"
    first, last = since[0], since[-1]
    growths = {name: last[name] - first.get(name, 0.0) for name in last if name != "activations"}
    return max(growths, key=lambda name: growths[name], default="other")
