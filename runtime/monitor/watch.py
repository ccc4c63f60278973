"""Defines `Watch`, which monitors one engine, and `NullWatch`, which replaces it if it is off.

`build_watch.py` builds a watch from its parts. This module does not import DeepSpeed. A script can
therefore import `zerowatch.initialize` before it imports DeepSpeed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ...metrics.catalog import training
from ...metrics.recorder import Recorder, Snapshot
from ...metrics.settings import Settings
from ...metrics.step_record import StepRecord
from ..common.fail_open import FailOpen
from ..common.interrupts import is_interrupt
from ..devices.gpu_health import asks_for_drain
from ..sinks.sink import Sink
from .final_report import announce_report
from .run_end_reason import end_reason, note_error
from .subscriptions import for_each

if TYPE_CHECKING:
    from ...metrics.exporters.server import MetricsServer
    from ..collectives.instrument import CollectiveInstrumentation
    from ..instrumentation.engine_instrumentation import EngineInstrumentation
    from .advisor import Advisor
    from .comparison_monitor import ComparisonMonitor
    from .memory_monitor import MemoryMonitor
    from .metrics_log import MetricsLog
    from .otel_exporter import OtelExporter
    from .overhead_metrics import OverheadMetrics
    from .run_folder import RunFolder
    from .run_info import RunInfoPublisher
    from .subscriptions import Subscriptions
    from .watch_sinks import WatchSinks
    from .watch_thread import WatchThread


class WhereServed(Protocol):
    """Knows where the metrics of a rank are served."""

    @property
    def address(self) -> str | None:
        """The "host:port" of the metrics. None if they are not served."""

    @property
    def live_page_url(self) -> str | None:
        """The URL of the live page. None if it is not served."""


@dataclass(frozen=True, slots=True)
class ServedAt:
    """Where this process serves its metrics."""

    address: str | None
    live_page_url: str | None


class Watch:
    """Monitors one engine until `close`. Stability: stable.

    `zerowatch.initialize` and `zerowatch.watch` create the watch, and store it as `engine.watch`.

    Examples:
        >>> engine, *_ = zerowatch.initialize(model=model, config="ds.json")
        >>> engine.watch.subscribe(lambda record: print(record.step, record.loss))
        >>> engine.watch.close()

    Attributes:
        recorder: Holds all metric values.
        settings: The settings of this run.
        fail_open: Wraps the functions that run inside training.
        advisor: Logs changes that would make the run faster, until a tuner replaces the advisor.
        writes_report: Whether `close` writes `report.html` and prints the tables of the run on rank
            0 after an end in good order, which takes a few seconds at most.
    """

    def __init__(
        self,
        *,
        engine: EngineRef,
        settings: Settings,
        recorder: Recorder,
        fail_open: FailOpen,
        server: MetricsServer,
        served_at: WhereServed,
        folder: RunFolder,
        metrics_log: MetricsLog,
        run_info: RunInfoPublisher,
        listeners: list[Callable[[Sequence[StepRecord]], object]],
        subscriptions: Subscriptions,
        sinks: WatchSinks,
        overhead: OverheadMetrics,
        collectives: CollectiveInstrumentation,
        instrumentation: EngineInstrumentation,
        memory: MemoryMonitor,
        comparison: ComparisonMonitor,
        otel: OtelExporter,
        advisor: Advisor,
        thread: WatchThread,
    ) -> None:
        self.settings, self.recorder, self.fail_open = settings, recorder, fail_open
        self._served_at, self.advisor = served_at, advisor
        self._engine, self._listeners, self._subscriptions = engine, listeners, subscriptions
        self._sinks = sinks
        self._server, self._folder, self._run_info = server, folder, run_info
        self._metrics_log = metrics_log
        self._collectives, self._instrumentation = collectives, instrumentation
        self._memory, self._comparison = memory, comparison
        self._otel, self._thread = otel, thread
        self._withdraw_targets = fail_open.wrap("run folder", folder.withdraw_targets)
        self._publish_overhead = fail_open.wrap("overhead", overhead.publish)
        self._on_run_error = fail_open.wrap("oom report", memory.on_run_error)
        self._trace_run_error = fail_open.wrap("traces", otel.trace_run_error)
        self._closed = self._failed = False
        self.writes_report = False

    @property
    def address(self) -> str | None:
        """The "host:port" at which this rank serves its metrics. None if it serves none."""
        return self._served_at.address

    @property
    def live_page_url(self) -> str | None:
        """The URL of the live page, on rank 0. None if it is not served."""
        return self._served_at.live_page_url

    @property
    def run_id(self) -> str | None:
        """The run id. On ranks other than 0, it is None until rank 0 has shared the id."""
        return self._folder.run_id

    @property
    def run_folder(self) -> Path | None:
        """The folder of the run's logs. None until the run has an id, or if no log is written."""
        return self._folder.path

    @property
    def is_open(self) -> bool:
        """Whether the watch is still open: True until `close` is called."""
        return not self._closed

    @property
    def has_stepped(self) -> bool:
        """Whether a step has ended."""
        return self._thread.has_stepped

    @property
    def forward_only_ns(self) -> int:
        """Nanoseconds in forward and evaluation since the last step; 0 after a backward pass."""
        return self._instrumentation.forward_only_ns

    @property
    def generated_ns(self) -> int:
        """Nanoseconds in calls of `generate` since the watch began, by the host."""
        return self._instrumentation.generated_ns

    def watches(self, engine: Any) -> bool:
        """Whether this watch monitors `engine`."""
        return self._engine() is engine

    def subscribe(self, listener: Callable[[StepRecord], object]) -> None:
        """Call `listener` with the record of each step, usually within a second after the step.

        All listeners share one thread. A listener that blocks this thread delays neither training
        nor monitoring. If a listener falls more than 1024 steps behind, further records are dropped
        and counted. Records that it has not handled 5 s after `close` are dropped and counted, too.

        If a listener raises an exception, zerowatch logs the first one, counts a hook failure and
        stops calling the listener. If the cause was a shortage of files, threads or disk space,
        zerowatch calls the listener again later. The listener does not get the records in between.

        Raises:
            TypeError: `listener` cannot be called.
        """
        if not callable(listener):
            raise TypeError(
                f"Watch.subscribe takes a function of a StepRecord, got {type(listener).__name__}"
            )
        self._subscriptions.add(listener)

    def add_sink(self, sink: Sink) -> None:
        """Write the values of the step record and of `/metrics` to a sink, on rank 0.

        On the other ranks the call has no effect. `sinks.interval_seconds` says how often a step is
        written. The methods of the sink are called on a thread that only sinks use.

        Raises:
            TypeError: `sink` has not the methods of a `Sink`.
        """
        for method in ("open", "write", "close"):
            if not callable(getattr(sink, method, None)):
                raise TypeError(
                    f"Watch.add_sink takes an object with open, write and close, "
                    f"got {type(sink).__name__} without {method}"
                )
        self._sinks.add(sink, type(sink).__name__)

    def log_values(self, values: Mapping[str, object], step: int | None = None) -> None:
        """Append values of the script, such as an evaluation's loss, to `logged.jsonl`.

        The file is in the run folder, with one JSON object per call: `step`, `unix_seconds` and
        `values`. It is written on rank 0, and on another thread. On the other ranks the call has no
        effect.

        Args:
            values: Numbers, texts, or tensors of one element, which are read on the other thread.
            step: The step of the script; by default none.
        """
        self._sinks.log_values(values, step)

    def subscribe_internal(self, listener: Callable[[StepRecord], object]) -> None:
        """Call `listener`, a function of zerowatch that never blocks, on the watch thread."""
        self._listeners.append(for_each(self.fail_open.wrap("listener", listener)))

    def rebind_engine(self, engine: Any) -> None:
        """Replace the watched engine by another engine of the same model and run.

        The counters, the run id, the server and all threads stay the same. All ranks call this
        method at the same point, between two windows. A closed watch stays closed.

        Args:
            engine: The new engine, for example after a rebuild.
        """
        engine.watch = self
        self._engine.rebind(engine)
        if self._closed:
            return
        self._instrumentation.rebind_engine(engine)
        self._memory.rebind_engine(engine)
        self._comparison.rebind_engine(engine)
        self._run_info.rebind_engine()

    def discard_window(self) -> None:
        """Discard the micro-batches since the last step, which will be repeated or skipped."""
        self._instrumentation.discard_window()

    def memory_limit_bytes(self, device: str) -> float | None:
        """Return the present limit of a device's memory, in bytes; None if it cannot be read."""
        return self.fail_open.call("memory limit", self._memory.limit_bytes, device)

    def checkpoint_phase(self) -> AbstractContextManager[None]:
        """Return a context manager; time inside it counts as checkpoint time, e.g. a rebuild."""
        return self._instrumentation.checkpoint_phase()

    def saving_checkpoint(self) -> AbstractContextManager[None]:
        """Return a context manager in which one checkpoint is saved, for the checkpoint metrics."""
        return self._instrumentation.checkpoints.saving()

    def copying_checkpoint(self) -> AbstractContextManager[None]:
        """Return a context manager in which a state is copied, to be written in the background."""
        return self._instrumentation.checkpoints.copying()

    def waiting_for_checkpoint(self) -> AbstractContextManager[None]:
        """Return a context manager in which training waits for a checkpoint in the background."""
        return self._instrumentation.checkpoints.waiting()

    def on_checkpoint_written(self, *, saved: bool, seconds: float, began_at: float) -> None:
        """Count a checkpoint that a thread has written, or failed to write.

        Args:
            saved: Whether it is complete.
            seconds: Time of writing.
            began_at: Unix time at which its state was copied.
        """
        self._instrumentation.checkpoints.written(saved=saved, seconds=seconds, began_at=began_at)

    def snapshot(self) -> Snapshot:
        """Return all metric values as they are now.

        Examples:
            >>> watch.snapshot().series()[training.STEPS.name]
            128.0
        """
        return self.recorder.snapshot()

    def close(
        self, *, failed: bool = False, interrupted: bool = False, at_exit: bool = False
    ) -> None:
        """Remove all hooks, write all pending records, and serve metrics until the last scrape.

        Safe to call twice. The call returns before the last scrape, unless `at_exit` is set.

        After an end in good order or by Ctrl-C, `run_active` is 0 until the last scrape, and
        `run_end_info` has the reason. After an exception the server closes at once: `run_active`
        remains 1 and then vanishes, by which alerts recognize the failure. `run_end_info` is then
        rarely scraped, but it is in the last export by OTLP. If a GPU must be drained, the server
        closes after the next scrape instead, because alerts name the GPU from it.

        Args:
            failed: Whether the run ends with an exception. A call while an exception is handled
                counts as such an end, too.
            interrupted: Whether Ctrl-C has ended the run. The wait for the last scrape is then
                shorter.
            at_exit: Whether the process ends now. The call then waits for the last scrape.
        """
        current = sys.exception()
        interrupted = interrupted or is_interrupt(current)
        failed = not interrupted and (failed or isinstance(current, Exception))
        # A later call, such as the call at exit, may not know of the failure.
        self._failed = self._failed or failed
        if not self._closed:
            self._closed = True
            if failed:
                self.advisor.disable()
                error = current or getattr(sys, "last_value", None)
                self._on_run_error(error)
                self._trace_run_error(error)
            self._close_hooks()
            self._close_parts(
                lambda: self._thread.enqueue_rest(self._collectives.call_recorder.drain()),
                self._thread.stop,
                self._subscriptions.close,
                lambda: self._sinks.close(failed=failed, interrupted=interrupted),
                self._comparison.stop,
                self._memory.close,
            )
            self._close_parts(lambda: self._publish_end(failed=failed, interrupted=interrupted))
            self._publish_overhead()
            if not self._thread.is_abandoned:  # else the thread may be inside of it
                self._close_parts(self._metrics_log.close)
            is_complete = self._thread.is_complete
            self._close_parts(lambda: self._folder.close(is_complete=is_complete), self._otel.close)
            self._publish_overhead()
            self._close_parts(lambda: self._announce_report(ok=not failed and not interrupted))
        if self._failed:
            if not self.fail_open.call("close", asks_for_drain, self.snapshot()):
                self._close_parts(self._server.close)
            elif at_exit:
                self._close_after_next_scrape()
            else:
                thread = Thread(target=self._close_after_next_scrape, daemon=True)
                self._close_parts(thread.start)  # without a thread, the server closes at exit
        elif at_exit:
            try:
                self._server.wait_for_final_scrape(interrupted=interrupted)
            finally:  # Ctrl-C ends the wait
                self._withdraw_targets()
                self._close_parts(self._server.close)
        else:
            self._server.close_after_final_scrape(self._withdraw_targets)

    def _close_after_next_scrape(self) -> None:
        try:
            self._close_parts(self._server.wait_for_next_scrape)
        finally:  # Ctrl-C ends the wait
            self._close_parts(self._server.close)

    def __repr__(self) -> str:
        """Return the state of the run on this rank in one line."""
        from .watch_html import watch_text

        return f"<{self.fail_open.call('repr', self._shown, watch_text) or 'zerowatch.Watch'}>"

    def _repr_html_(self) -> str:
        """Return the state of the run on this rank, which a notebook shows for the object."""
        from .watch_html import watch_html

        return self.fail_open.call("notebook", self._shown, watch_html) or "<b>zerowatch</b>"

    def _shown(self, form: Callable[..., str]) -> str:
        return form(
            self.snapshot(),
            run_id=self.run_id,
            is_open=self.is_open,
            page_url=self.live_page_url,
            folder=self.run_folder,
        )

    def close_after_fork(self) -> None:
        """Deactivate the watch in a forked child: close the sockets, touch no thread."""
        self._closed = True
        self._close_parts(
            self._server.close, self._comparison.forget_hooks, self._otel.close_after_fork
        )
        self._close_hooks()

    def _publish_end(self, *, failed: bool, interrupted: bool) -> None:
        error = sys.exception() or getattr(sys, "last_value", None)
        with self.recorder.commit():
            if not failed:
                self.recorder.set(training.RUN_ACTIVE, 0)
            reason = end_reason(error, failed=failed, interrupted=interrupted)
            self.recorder.set_info(training.RUN_END_INFO, reason)
        folder = self.run_folder
        if failed and error is not None and folder is not None:
            note_error(folder, self._folder.rank, error, reason)

    def _announce_report(self, *, ok: bool) -> None:
        folder = self.run_folder
        if folder is not None and self._folder.rank == 0:
            announce_report(
                folder, is_ours=ok and self.writes_report, console=self.settings.console
            )

    def _close_hooks(self) -> None:
        self._close_parts(
            self._instrumentation.restore,
            self._memory.close_hooks,
            self._comparison.close_hooks,
            self._collectives.close,
        )

    def _close_parts(self, *parts: Callable[[], object]) -> None:
        """Close all parts, even if closing one of them fails."""
        for close in parts:
            self.fail_open.call("close", close)


class NullWatch:
    """Replaces a watch if monitoring is off or could not start. Its methods do nothing."""

    run_id: str | None = None
    run_folder: Path | None = None
    address: str | None = None
    live_page_url: str | None = None
    is_open = False
    writes_report = False
    generated_ns = 0

    def __init__(self) -> None:
        self.recorder = Recorder()  # nobody reads it

    def watches(self, engine: Any) -> bool:
        """Return False."""
        return False

    def subscribe(self, listener: Callable[[StepRecord], object]) -> None:
        """Never call the listener."""

    def subscribe_internal(self, listener: Callable[[StepRecord], object]) -> None:
        """Never call the listener."""

    def add_sink(self, sink: Sink) -> None:
        """Never write to the sink."""

    def log_values(self, values: Mapping[str, object], step: int | None = None) -> None:
        """Do nothing."""

    def snapshot(self) -> Snapshot:
        """Return a snapshot without values."""
        return Snapshot(values={}, distributions={})

    def rebind_engine(self, engine: Any) -> None:
        """Set the attribute `watch` of the new engine."""
        engine.watch = self

    def discard_window(self) -> None:
        """Do nothing."""

    def memory_limit_bytes(self, device: str) -> float | None:
        """Return None."""
        return None

    def checkpoint_phase(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return nullcontext()

    def saving_checkpoint(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return nullcontext()

    def copying_checkpoint(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return nullcontext()

    def waiting_for_checkpoint(self) -> AbstractContextManager[None]:
        """Return a context manager that does nothing."""
        return nullcontext()

    def on_checkpoint_written(self, *, saved: bool, seconds: float, began_at: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def __repr__(self) -> str:
        """Return that monitoring is off."""
        return "<zerowatch.Watch: monitoring is off>"

    def _repr_html_(self) -> str:
        """Return that monitoring is off."""
        return "<b>zerowatch</b> &middot; monitoring is off"


# The type of `engine.watch`, whether the engine is watched or not.
WatchHandle: TypeAlias = Watch | NullWatch


class EngineRef:
    """A weak reference to the watched engine. A rebuild replaces the engine."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> Any:
        """Return the engine, or None if it was garbage-collected."""
        return self._engine()

    def rebind(self, engine: Any) -> None:
        """Refer to another engine from now on."""
        self._engine = weakref.ref(engine)
