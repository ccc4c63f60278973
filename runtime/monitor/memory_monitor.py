"""Memory of this rank: what it is, what the next steps will need, and reports once it is out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...metrics.catalog import memory
from ...metrics.settings import MemorySettings
from ..devices.memory.free_heap import free_heap_bytes
from ..devices.memory.probe import MemoryProbe
from ..instrumentation.memory_hooks import MemoryHooks
from ..instrumentation.raw_step import RawStep
from ..instrumentation.watch_context import WatchContext
from ..memory.category_sums import baseline
from ..memory.engine_memory import bytes_by_category
from ..memory.forecast.series import PeakPoint
from ..memory.forecast_service import MemoryForecasts
from ..memory.leak_monitor import LeakMonitor
from ..memory.memory_reader import MemoryReader, Readings
from ..memory.metrics import MemoryMetrics
from ..memory.offload.traffic import OffloadTraffic
from ..memory.oom.killed_ranks import detect_killed_ranks
from ..memory.oom.liveness_file import LivenessFile
from ..memory.oom.parse_error import ends_by_memory
from ..memory.oom.post_mortem import PostMortem
from ..memory.step_sample import StepMemorySample
from .oom_context import MemoryParts, oom_sources

logger = logging.getLogger(__name__)

# Without steps, as in an evaluation or while data is loaded, memory is read this often.
IDLE_SECONDS = 5.0
MAX_READINGS = 256


class MemoryMonitor:
    """Made on the training thread; `take` and `publish` run on the watch thread.

    Attributes:
        hooks: What the engine's hooks call.
    """

    def __init__(self, context: WatchContext, engine: Any, probes: Sequence[MemoryProbe]) -> None:
        wrap, settings = context.fail_open.wrap, context.settings.memory
        self._enabled = settings.enabled
        self._probes = probes
        reads = {probe.device: wrap("memory", probe.read) for probe in probes}
        self._meter = MemoryReader(reads, _budgets(settings, reads))
        self._figures = MemoryMetrics(context.recorder, self._baseline(context, engine))
        self._forecasts = MemoryForecasts(context.recorder)
        rank = context.identity.rank
        self._leaks = LeakMonitor(
            context.recorder, rank, context.folder, trace_sites=settings.leak_sites
        )
        self._readings: deque[tuple[int, StepMemorySample]] = deque(maxlen=MAX_READINGS)
        self.hooks = MemoryHooks(
            engine,
            self._meter,
            context.clock,
            context.fail_open,
            judge=self._forecasts.assess_batch,
            raised=self._raised,
            look_seconds=settings.detailed_sample_seconds if settings.enabled else None,
        )
        self._context = context
        self._post_mortem = self._new_post_mortem() if settings.enabled else None
        self._oom_device = "cpu"
        self._life: LivenessFile | None = None
        self._closed = self._moved = False
        self._offload: OffloadTraffic | None = None
        if settings.enabled:
            self._log_devices_without_step_peaks()
            offload = wrap("offload", OffloadTraffic)
            self._offload = offload(engine, context.fail_open, context.call_recorder.events)
        self._duties = self._wrapped_duties()

    @property
    def cost_ns(self) -> int:
        """Nanoseconds that hooks on offloading took on the training thread."""
        return 0 if self._offload is None else self._offload.cost_ns

    def take(self, closed: RawStep) -> Mapping[str, float]:
        """Take what was read at the end of a step; return the risk by device."""
        reading = closed.memory
        if reading is not None:
            self._readings.append((closed.step, reading))
            if self._enabled:
                points = reading.points(closed.step)
                self._leaks.add(points)
                if reading.trained_only:
                    self._forecasts.add(self._with_own_peaks(points, reading))
        return self._forecasts.risks

    def publish(self) -> None:
        """Publish what has come since the last second."""
        for duty in self._duties:
            duty()

    def ended_by(self, error: BaseException | None) -> None:
        """Take note of the error that ends this run, which need not have passed the engine."""
        if error is not None and self._post_mortem is not None and ends_by_memory(error):
            self._raised(error, is_end=True)
            self._context.recorder.add(memory.OOMS, 1, self._oom_device, "fatal")

    def rebind_engine(self, engine: Any) -> None:
        """Look at another engine of the same model; what was learnt of the old one is forgotten."""
        if self._offload is not None:
            self._context.fail_open.wrap("offload", self._offload.rebind_engine)(engine)
        self._moved = True

    def close_hooks(self) -> None:
        """End what runs in training. Safe to call twice."""
        self.hooks.close()
        if self._offload is not None:
            self._offload.restore()

    def close(self) -> None:
        """End what is under way. Safe to call twice."""
        self._closed = True
        wrap = self._context.fail_open.wrap
        for end in (self.close_hooks, *(probe.close for probe in self._probes), self._leaks.close):
            wrap("memory", end)()
        if self._life is not None:
            self._life.close()

    def _new_post_mortem(self) -> PostMortem:
        parts = MemoryParts(
            meter=self._meter,
            hooks=self.hooks,
            figures=self._figures,
            forecasts=self._forecasts,
            leaks=self._leaks,
        )
        return PostMortem(self._context.identity.rank, oom_sources(self._context, parts))

    def _wrapped_duties(self) -> list[Callable[[], object]]:
        """List what is done each second; one that fails leaves the others be."""
        duties: dict[str, Callable[[], object]] = {"memory metrics": self._publish_figures}
        if self._enabled:
            duties["memory baseline"] = self._forget_if_moved
            duties["forecasts"] = self._forecasts.update
            duties["leaks"] = self._leaks.look
            duties["killed ranks"] = self._write_liveness_file
        offload = self._offload
        if offload is not None:
            duties["offload"] = lambda: offload.publish(self._context.recorder)
        return [self._context.fail_open.wrap(name, duty) for name, duty in duties.items()]

    def _forget_if_moved(self) -> None:
        """Begin to learn anew, on the thread that learns."""
        if self._moved:
            self._moved = False
            self._forecasts.reset()
            self._leaks.begin_anew()

    def _publish_figures(self) -> None:
        while self._readings:
            step, reading = self._readings.popleft()
            self._figures.publish(reading)
            if reading.look is not None:
                self._leaks.add_look(step, self._figures.categories)
        if self._meter.age_seconds > IDLE_SECONDS:
            self._figures.publish_states(self._meter.read())

    def _with_own_peaks(
        self, points: Mapping[str, PeakPoint], reading: StepMemorySample
    ) -> Mapping[str, PeakPoint]:
        """Leave out devices whose peaks are not of these steps alone."""
        own = {probe.device for probe in self._probes if probe.own_peaks}
        return {
            device: point
            for device, point in points.items()
            if device in own and "peak_allocated" in reading.readings[device]
        }

    def _log_devices_without_step_peaks(self) -> None:
        blind = [probe.device for probe in self._probes if not probe.own_peaks]
        if blind:
            logger.info(
                "nothing is foreseen of the memory of %s: its peaks are not told by step "
                "(memory.reset_peak_counters is off, or the system does not allow it)",
                " and ".join(blind),
            )

    def _write_liveness_file(self) -> None:
        """Once there is a run folder, look for ranks that were killed, and leave a life file."""
        folder = None if self._life is not None or self._closed else self._context.folder()
        if folder is None:
            return
        rank, host = self._context.identity.rank, self._context.identity.host
        killed = [
            found for found in detect_killed_ranks(folder.parent, host) if found.by_oom_killer
        ]
        if killed:
            self._context.recorder.add(memory.OOMS, len(killed), "cpu", "killed")
        self._life = LivenessFile(folder, rank, host)
        self._life.open()

    def _baseline(self, context: WatchContext, engine: Any) -> Mapping[str, float]:
        held = context.fail_open.wrap("memory categories", bytes_by_category)(engine) or {}
        readings: Readings = self._meter.take()
        in_use = {device: states.get("allocated", 0.0) for device, states in readings.items()}
        if "cpu" in in_use:
            in_use["cpu"] -= free_heap_bytes()
        return {
            device: baseline(device, size, held.get(device, {})) for device, size in in_use.items()
        }

    def _raised(self, error: BaseException, *, is_end: bool = False) -> None:
        """Look into an error that passes through the engine, or ends the run. Training thread."""
        if self._post_mortem is not None:
            out = self._post_mortem.on_error(error, is_end=is_end)
            if out is not None:
                self._oom_device = out.device
                self._context.recorder.add(memory.OOMS, 1, out.device, "raised")


def _budgets(settings: MemorySettings, devices: Mapping[str, object]) -> Mapping[str, float]:
    budgets = {
        device: settings.host_limit_bytes if device == "cpu" else settings.device_limit_bytes
        for device in devices
    }
    return {device: float(budget) for device, budget in budgets.items() if budget is not None}
