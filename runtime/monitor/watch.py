"""Defines `Watch`, which monitors one engine, and `NullWatch`, which replaces it if it is off.

`build_watch.py` builds a watch from its parts. This module does not import DeepSpeed. A script can
therefore import `zerowatch.initialize` before it imports DeepSpeed.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from ..common.outer_error import OuterError
from ..devices.gpu_health import asks_for_drain
from ..sinks.sink import Sink
from .final_report import announce_report
from .run_end_reason import end_reason, note_error
from .subscriptions import for_each

if TYPE_CHECKING:
    from ...metrics.exporters.server import MetricsServer
    from ..collectives.instrument import CollectiveInstrumentation
    from ..common.exit_calls import ExitCalls
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
        on_good_end: Functions that `close` calls first, unless the run ends with an exception.
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
        exit_calls: ExitCalls,
    ) -> None:
        self.settings, self.recorder, self.fail_open = settings, recorder, fail_open
        self._served_at, self.advisor = served_at, advisor
        self._engine, self._listeners, self._subscriptions = engine, listeners, subscriptions
        self._sinks = sinks
        self._server, self._folder, self._run_info = server, folder, run_info
        self._metrics_log = metrics_log
        self._collectives, self._instrumentation = collectives, instrumentation
        self._memory, self._comparison = memory, comparison
        self._otel, self._thread, self._exit_calls = otel, thread, exit_calls
        self._withdraw_targets = fail_open.wrap("run folder", folder.withdraw_targets)
        self._publish_overhead = fail_open.wrap("overhead", overhead.publish)
        self._on_run_error = fail_open.wrap("oom report", memory.on_run_error)
        self._trace_run_error = fail_open.wrap("traces", otel.trace_run_error)
        self._outer_error = OuterError()
        self._closed = self._failed = self._interrupted = False
        self._is_closing = self._is_forked = False
        self._unclosed: deque[Callable[[], object]] = deque()
        self.writes_report = False
        self.on_good_end: list[Callable[[], object]] = []

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

    @property
    def has_exit_failed(self) -> bool:
        """Whether the script ends by `sys.exit` with a status other than 0."""
        return self._exit_calls.has_failed

    @property
    def last_cell_failed(self) -> bool | None:
        """Whether the last cell of a notebook raised. None if no cell has ended, as in a script."""
        return self._instrumentation.last_cell_failed

    @property
    def uncaught_error(self) -> BaseException | None:
        """The error that has ended the script, or a cell of a notebook, since the watch opened."""
        return self._outer_error.newer_uncaught()

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
        effect. Lines that cannot be written, as on a full disk, are dropped and counted, and so are
        those that come while 65,536 lines or 64 MiB of values wait. In a forked process, the call
        writes the line itself. Values after the end of the run are not written, which is logged.

        Args:
            values: Numbers, texts, or tensors of one element. A tensor counts as it is now; for its
                copy from a device, only the other thread waits.
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

    def restart_forecasts(self, *, after_step: int, use: Hashable) -> None:
        """Forecast memory only from readings of one use of it; see `MemoryForecasts.restart`."""
        restart, hooks = self._memory.analysis.forecasts.restart, self._memory.hooks
        self.fail_open.call("forecasts", restart, after_step=after_step, use=use)
        if not self._closed:
            self.fail_open.call("memory", hooks.on_use_changed)

    def memory_limit_bytes(self, device: str) -> float | None:
        """Return the present limit of a device's memory, in bytes; None if it cannot be read."""
        return self.fail_open.call("memory limit", self._memory.limit_bytes, device)

    def checkpoint_phase(self) -> AbstractContextManager[None]:
        """Return a context manager; time inside it counts as checkpoint time, e.g. a rebuild.

        It has no effect on other threads than the training thread.
        """
        return self._instrumentation.checkpoint_phase()

    @contextmanager
    def saving_checkpoint(self) -> Iterator[None]:
        """Return a context manager in which one checkpoint is saved.

        It counts the checkpoint. On the training thread, time inside it is checkpoint time.
        """
        with self.checkpoint_phase(), self._instrumentation.checkpoints.saving():
            yield

    def copying_checkpoint(self) -> AbstractContextManager[None]:
        """Return a context manager in which a state is copied, to be written in the background."""
        return self._instrumentation.checkpoints.copying()

    @contextmanager
    def waiting_for_checkpoint(self) -> Iterator[None]:
        """Return a context manager in which training waits for a checkpoint in the background."""
        with self.checkpoint_phase(), self._instrumentation.checkpoints.waiting():
            yield

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

        Safe to call twice, and in a forked child, where it does nothing. If Ctrl-C ends a call, the
        next one, such as that at exit, goes on there. The call returns before the last scrape,
        unless `at_exit` is set.

        After an end in good order or by Ctrl-C, `run_active` is 0 until the last scrape, and
        `run_end_info` has the reason. After an exception the server closes at once: `run_active`
        remains 1 and then vanishes, by which alerts recognize the failure. `run_end_info` is then
        rarely scraped, but it is first in the last export by OTLP. If a GPU must be drained, or a
        checkpoint could not be saved within the last minute, the server closes after the next
        scrape instead, because alerts need it.

        Args:
            failed: Whether the run ends with an exception. A call while an exception is handled
                counts as such an end, too, unless the watch was opened in the same handler.
            interrupted: Whether Ctrl-C has ended the run. The wait for the last scrape is then
                shorter.
            at_exit: Whether the process ends now. The call then waits for the last scrape, and
                until the end of the run was sent by OTLP.
        """
        if self._is_forked:
            return
        current = self._outer_error.newer()
        # A later call, such as the call at exit, may not know how the run has ended.
        if not self._failed:
            self._interrupted = self._interrupted or interrupted or is_interrupt(current)
        if not self._interrupted:
            self._failed = self._failed or failed or isinstance(current, Exception)
        if not self._closed:
            error = current or self.uncaught_error
            self._closed, self._unclosed = True, deque(self._parts_to_close(error))
        self._close_rest()
        try:
            self._close_server(at_exit=at_exit)
            if at_exit:
                self._close_parts(self._otel.wait_for_end)
        finally:  # Ctrl-C ends the waits
            if at_exit:
                self._close_parts(self._otel.give_up)

    def _close_server(self, *, at_exit: bool) -> None:
        if self._failed:
            if not self.fail_open.call("close", self._has_unread_fault):
                self._close_parts(self._server.close)
            elif at_exit:
                self._close_after_next_scrape()
            else:
                thread = Thread(target=self._close_after_next_scrape, daemon=True)
                self._close_parts(thread.start)  # without a thread, the server closes at exit
        elif at_exit:
            try:
                self._server.wait_for_final_scrape(interrupted=self._interrupted)
            finally:  # Ctrl-C ends the wait
                self._withdraw_targets()
                self._close_parts(self._server.close)
        else:
            self._server.close_after_final_scrape(self._withdraw_targets)

    def _has_unread_fault(self) -> bool:
        checkpoints = self._instrumentation.checkpoints
        return asks_for_drain(self.snapshot()) or checkpoints.failed_lately()

    def _parts_to_close(self, error: BaseException | None) -> Iterator[Callable[[], object]]:
        """Yield what closes the parts, in this order. Each may be called twice.

        Args:
            error: The error that ends the run, if it fails.
        """
        if self._failed:
            yield self.advisor.disable
            yield lambda: self._on_run_error(error)
            yield lambda: self._trace_run_error(error)
        else:
            yield from self.on_good_end
        yield from self._hooks()
        yield lambda: self._thread.enqueue_rest(self._collectives.call_recorder.drain())
        yield self._stop_thread
        yield self._subscriptions.close
        yield lambda: self._sinks.close(failed=self._failed, interrupted=self._interrupted)
        yield self._comparison.stop
        yield self._memory.close
        yield lambda: self._publish_end(error)
        yield self._publish_overhead
        yield self._close_metrics_log
        yield lambda: self._folder.close(is_complete=self._thread.is_complete)
        yield self._otel.close
        yield self._publish_overhead
        yield self._announce_report

    def _close_rest(self) -> None:
        """Close the parts that are still open, unless another call of `close` is doing so."""
        if self._is_closing:
            return
        self._is_closing = True
        try:
            while self._unclosed:
                self._close_parts(self._unclosed[0])
                self._unclosed.popleft()
        except KeyboardInterrupt:
            self._interrupted = not self._failed
            raise
        finally:
            self._is_closing = False

    def _stop_thread(self) -> None:
        self._thread.stop(waits_for_device=not self._failed and not self._interrupted)

    def _close_metrics_log(self) -> None:
        if not self._thread.is_abandoned:  # else the thread may be inside of it
            self._metrics_log.close()

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
        self._closed = self._is_forked = True
        self._close_parts(
            self._server.close,
            self._comparison.forget_hooks,
            self._otel.close_after_fork,
            self._sinks.continue_after_fork,
            *self._hooks(),
        )

    def _publish_end(self, error: BaseException | None) -> None:
        with self.recorder.commit():
            if not self._failed:
                self.recorder.set(training.RUN_ACTIVE, 0)
            reason = end_reason(
                error,
                failed=self._failed,
                interrupted=self._interrupted,
                is_oom=self._memory.is_caused_by_oom,
            )
            self.recorder.set_info(training.RUN_END_INFO, reason)
        folder = self.run_folder
        if self._failed and error is not None and folder is not None:
            note_error(folder, self._folder.rank, error, reason)

    def _announce_report(self) -> None:
        folder, ok = self.run_folder, not self._failed and not self._interrupted
        if folder is not None and self._folder.rank == 0:
            announce_report(
                folder, is_ours=ok and self.writes_report, console=self.settings.console
            )

    def _hooks(self) -> Iterator[Callable[[], object]]:
        """Yield what closes the hooks."""
        yield self._instrumentation.restore
        yield self._memory.close_hooks
        yield self._comparison.close_hooks
        yield self._collectives.close
        yield self._exit_calls.close

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

    def restart_forecasts(self, *, after_step: int, use: Hashable) -> None:
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
