"""Reads the memory of one engine: its samples, out-of-memory errors, offload and liveness file."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...metrics.backoff import Backoff
from ...metrics.catalog import memory
from ...metrics.settings import MemorySettings
from ..common.gil_pauses import let_training_run
from ..common.liveness_file import LivenessFile
from ..common.torch_engine import TorchEngine
from ..cross_rank.hang.thread_stacks import runs_python
from ..devices.libc_memory import free_heap_bytes
from ..devices.memory_probes import MemoryProbe
from ..instrumentation.memory_hooks import MemoryHooks
from ..instrumentation.watch_context import WatchContext
from ..memory.categories import baseline
from ..memory.engine_memory import bytes_by_category
from ..memory.memory_reader import MemoryReader, Readings
from ..memory.offload.traffic import OffloadTraffic
from ..memory.oom.error_report import OomReporter
from ..memory.oom.killed_ranks import detect_killed_ranks
from ..memory.oom.oom_finder import OomFinder
from .log_file import RETRY_SECONDS
from .memory_analysis import MemoryAnalysis
from .oom_context import EngineOomContext, MemoryParts

logger = logging.getLogger(__name__)

# Interval between readings while no step ends, such as in an evaluation or while data is loaded.
IDLE_SECONDS = 5.0
# How long the report of an out-of-memory error waits for the readings of the last second.
CATCH_UP_SECONDS = 0.2


class MemoryMonitor:
    """Monitors the memory of one engine.

    Created on the training thread; `publish` runs on the watch thread.

    Attributes:
        analysis: Analyses the samples.
        hooks: Called by the engine's hooks.
        catch_up: Waits until the watch thread has taken the steps so far, for at most some seconds.
    """

    def __init__(
        self,
        context: WatchContext,
        engine: Any,
        probes: Sequence[MemoryProbe],
        make_analysis: Callable[..., MemoryAnalysis] = MemoryAnalysis,
    ) -> None:
        wrap, settings = context.fail_open.wrap, context.settings.memory
        self._context = context
        self._enabled = settings.enabled
        self._probes = probes
        reads = {probe.device: wrap("memory", probe.read) for probe in probes}
        by_device = {probe.device: probe for probe in probes}
        self._reader = MemoryReader(
            reads, _budgets(settings, reads), lambda device: by_device[device].own_peaks
        )
        self.analysis = make_analysis(
            context.recorder,
            context.fail_open,
            settings,
            baseline_bytes=self._baseline(engine),
            devices=reads,
            has_step_peaks=lambda device: by_device[device].own_peaks,
            rank=context.identity.rank,
            folder=context.folder,
        )
        self.hooks = MemoryHooks(
            engine,
            self._reader,
            context.phase_timer,
            context.fail_open,
            forecasts=self.analysis.forecasts,
            on_exception=self._on_exception,
            detail_seconds=settings.detailed_sample_seconds if settings.enabled else None,
        )
        self._oom_finder = OomFinder()
        self._oom_reporter = self._new_oom_reporter() if settings.enabled else None
        self._oom_device = "cpu"
        self.catch_up: Callable[[float], None] = lambda seconds: None
        self._liveness: LivenessFile | None = None
        self._liveness_backoff = Backoff(RETRY_SECONDS, RETRY_SECONDS)
        self._began_unix_seconds = time.time()
        self._closed = False
        self._offload: OffloadTraffic | None = None
        if settings.enabled:
            self._log_devices_without_step_peaks()
        if settings.enabled and not isinstance(engine, TorchEngine):
            self._offload = context.fail_open.call(
                "offload", OffloadTraffic, engine, context.fail_open, context.call_recorder.events
            )
        self._read = wrap("memory metrics", self._read_between_steps)
        self._tasks = self._periodic_tasks()

    @property
    def cost_ns(self) -> int:
        """Nanoseconds that the offload hooks have taken on the training thread."""
        return 0 if self._offload is None else self._offload.cost_ns

    def publish(self) -> None:
        """Publish all samples since the last call. Called every second."""
        if self._reader.age_seconds > IDLE_SECONDS:
            readings = self._read()
            if readings is not None:
                self.analysis.add_idle_readings(readings)
        self.analysis.publish()
        for task in self._tasks:
            let_training_run()
            task()

    def on_run_error(self, error: BaseException | None) -> None:
        """Count and report the error that ends this run, if it is an out-of-memory error.

        The error may come from code outside the engine.
        """
        if error is None or self._oom_reporter is None or not self.is_caused_by_oom(error):
            return
        self._on_exception(error, is_end=True)
        self._context.recorder.add(memory.OOMS, 1, self._oom_device, "fatal")

    def is_caused_by_oom(self, error: BaseException) -> bool:
        """Return whether memory ran out, in this process or in a worker of its data loader."""
        return self._oom_finder.is_caused_by_oom(error)

    def limit_bytes(self, device: str) -> float | None:
        """Read the present limit of a device's memory. Peaks of the step are kept."""
        return self._reader.read().get(device, {}).get("limit")

    def rebind_engine(self, engine: Any) -> None:
        """Monitor another engine of the same model; discard the readings of the old one."""
        if self._offload is not None:
            self._context.fail_open.call("offload", self._offload.rebind_engine, engine)
        self.analysis.on_engine_replaced()

    def close_hooks(self) -> None:
        """Remove all hooks from training. Safe to call twice."""
        self.hooks.close()
        if self._offload is not None:
            self._offload.restore()

    def close(self) -> None:
        """Remove hooks, close probes and files. Safe to call twice."""
        self._closed = True
        call = self._context.fail_open.call
        for end in (
            self.close_hooks,
            *(probe.close for probe in self._probes),
            self.analysis.close,
        ):
            call("memory", end)
        if self._liveness is not None:
            self._liveness.close()

    def _read_between_steps(self) -> Readings:
        """Read the memory on the watch thread; only that of the host if training is in a call.

        The next publication then tries to read the device again.

        The call may hold the lock of torch's allocator until the device is idle, as cudaFree after
        a shortage does, which in a hang never ends. To read the allocator takes this lock with the
        interpreter lock held: then no thread of Python would run, and the hang not be reported.
        """
        timer = self._context.phase_timer
        is_host_alone = all(probe.device == "cpu" for probe in self._probes)
        reads_all = is_host_alone or timer.is_stopped or runs_python(timer.training_thread)
        return self._reader.read(None if reads_all else "cpu")

    def _new_oom_reporter(self) -> OomReporter:
        parts = MemoryParts(
            reader=self._reader,
            hooks=self.hooks,
            metrics=self.analysis.metrics,
            forecasts=self.analysis.forecasts,
            leaks=self.analysis.leaks,
        )
        context = EngineOomContext(self._context, parts)
        return OomReporter(self._context.identity.rank, context, self._oom_finder)

    def _periodic_tasks(self) -> list[Callable[[], object]]:
        """Return the functions to call every second. If one fails, the others still run."""
        tasks: dict[str, Callable[[], object]] = {"oom kills": self._oom_finder.refresh}
        if self._enabled:
            tasks["killed ranks"] = self._write_liveness_file
        offload = self._offload
        if offload is not None:
            tasks["offload"] = lambda: offload.publish(self._context.recorder)
        wrap = self._context.fail_open.wrap
        # A transfer that cannot be timed is skipped, and the next publication reads those after it.
        return [wrap(name, task, is_kept=name == "offload") for name, task in tasks.items()]

    def _log_devices_without_step_peaks(self) -> None:
        devices = [probe.device for probe in self._probes if not probe.own_peaks]
        if devices:
            logger.info(
                "memory forecast disabled for %s: per-step peaks are not available "
                "(memory.reset_peak_counters is off, or the system does not support it)",
                " and ".join(devices),
            )

    def _write_liveness_file(self) -> None:
        """Once the run folder exists, report killed ranks and write this rank's liveness file."""
        if self._liveness is not None and self._liveness.is_missing and not self._closed:
            if self._liveness_backoff.is_due:
                self._liveness_backoff.start_delay()
                self._liveness.open()
            return
        skip = self._liveness is not None or self._closed
        folder = None if skip else self._context.folder()
        if folder is None:
            return
        rank, host = self._context.identity.rank, self._context.identity.host
        killed_ranks = detect_killed_ranks(
            folder.parent, host, before_unix_seconds=self._began_unix_seconds
        )
        killed = [each for each in killed_ranks if each.by_oom_killer]
        if killed:
            self._context.recorder.add(memory.OOMS, len(killed), "cpu", "killed")
        self._liveness = LivenessFile(
            folder, rank, host, began_unix_seconds=self._began_unix_seconds
        )
        self._liveness.open()

    def _baseline(self, engine: Any) -> Mapping[str, float]:
        held = self._context.fail_open.call("memory categories", bytes_by_category, engine) or {}
        readings: Readings = self._reader.sample_step()
        in_use = {device: states.get("allocated", 0.0) for device, states in readings.items()}
        if "cpu" in in_use:
            in_use["cpu"] -= free_heap_bytes()
        return {
            device: baseline(device, size, held.get(device, {})) for device, size in in_use.items()
        }

    def _on_exception(self, error: BaseException, *, is_end: bool = False) -> None:
        """Report an out-of-memory error that passes through the engine, or ends the run.

        Runs on the training thread.
        """
        if self._oom_reporter is not None:
            if self.is_caused_by_oom(error):
                self.catch_up(CATCH_UP_SECONDS)
            oom = self._oom_reporter.on_error(error, is_end=is_end)
            if oom is not None:
                self._oom_device = oom.device
                self._context.step_errors.add_exception("out_of_memory", error)
                self._context.recorder.add(memory.OOMS, 1, oom.device, "raised")


def _budgets(settings: MemorySettings, devices: Mapping[str, object]) -> Mapping[str, float]:
    budgets = {
        device: settings.host_limit_bytes if device == "cpu" else settings.device_limit_bytes
        for device in devices
    }
    return {device: float(budget) for device, budget in budgets.items() if budget is not None}
