"""Monitors one engine, or does nothing where monitoring is off.

`build_watch.py` makes a watch from its parts. This module does not import DeepSpeed, so that
`zerowatch.initialize` can be imported before the script imports DeepSpeed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ...metrics.catalog import training
from ...metrics.recorder import Recorder, Snapshot
from ...metrics.settings import Settings
from ...metrics.step_record import StepRecord
from ..common.fail_open import FailOpen

if TYPE_CHECKING:
    from ...metrics.exporters.server import MetricsServer
    from ..collectives.instrument import CollectiveInstrumentation
    from ..instrumentation.engine_instrumentation import EngineInstrumentation
    from .advisor import Advisor
    from .comparison_monitor import ComparisonMonitor
    from .memory_monitor import MemoryMonitor
    from .otel_exporter import OtelExporter
    from .overhead_metrics import OverheadMetrics
    from .run_folder import RunFolder
    from .run_info import RunInfoPublisher
    from .subscriptions import Subscriptions
    from .watch_thread import WatchThread


class Watch:
    """Monitors one engine until `close`. Stability: stable.

    `zerowatch.initialize` and `zerowatch.watch` make it; it is also `engine.watch`.

    Examples:
        >>> engine, *_ = zerowatch.initialize(model=model, config="ds.json")
        >>> engine.watch.subscribe(lambda record: print(record.step, record.loss))
        >>> engine.watch.close()

    Attributes:
        address: "host:port" at which this rank serves its metrics; None if it does not.
        recorder: Holds all metric values.
        settings: The settings of this run.
        fail_open: Wraps the functions that run inside training.
        advisor: Logs what would make the run faster, until a tuner replaces it.
    """

    def __init__(
        self,
        *,
        engine: EngineRef,
        settings: Settings,
        recorder: Recorder,
        fail_open: FailOpen,
        server: MetricsServer,
        address: str | None,
        folder: RunFolder,
        run_info: RunInfoPublisher,
        listeners: list[Callable[[StepRecord], object]],
        subscriptions: Subscriptions,
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
        self.address, self.advisor = address, advisor
        self._engine, self._listeners, self._subscriptions = engine, listeners, subscriptions
        self._server, self._folder, self._run_info = server, folder, run_info
        self._collectives, self._instrumentation = collectives, instrumentation
        self._memory, self._comparison = memory, comparison
        self._otel, self._thread = otel, thread
        self._withdraw_targets = fail_open.wrap("run folder", folder.withdraw_targets)
        self._publish_overhead = fail_open.wrap("overhead", overhead.publish)
        self._on_run_error = fail_open.wrap("oom report", memory.on_run_error)
        self._closed = self._failed = False

    @property
    def run_id(self) -> str | None:
        """The run id. On ranks other than 0 it is None for a moment, until rank 0 wrote it."""
        return self._folder.run_id

    @property
    def run_folder(self) -> Path | None:
        """The folder of the run's logs; None while the run has no id, or if none are written."""
        return self._folder.path

    @property
    def is_open(self) -> bool:
        """Whether `close` was not called yet."""
        return not self._closed

    @property
    def forward_only_ns(self) -> int:
        """Nanoseconds of forward passes and evaluations since the last step, before a backward."""
        return self._instrumentation.forward_only_ns

    def watches(self, engine: Any) -> bool:
        """Whether this engine is the watched one."""
        return self._engine() is engine

    def subscribe(self, listener: Callable[[StepRecord], object]) -> None:
        """Call `listener` with the record of each step, usually within a second of it.

        All listeners share a thread, which they may block: that delays neither training nor
        monitoring. Records that a listener is more than 1024 steps late for, or has not returned
        for 5 s after `close`, are dropped and counted. A listener that raises is counted as a hook
        failure, logged once and dropped; after a shortage of files, threads or disk space it is
        called again later, without the records of the time between.

        Raises:
            TypeError: `listener` cannot be called.
        """
        if not callable(listener):
            raise TypeError(
                f"Watch.subscribe takes a function of a StepRecord, got {type(listener).__name__}"
            )
        self._subscriptions.add(listener)

    def subscribe_internal(self, listener: Callable[[StepRecord], object]) -> None:
        """Call a function of zerowatch, which never blocks, on the watch thread with each step."""
        self._listeners.append(self.fail_open.wrap("listener", listener))

    def rebind_engine(self, engine: Any) -> None:
        """Watch another engine of the same model and run from now on, between two windows.

        Counters, run, server and all threads stay. All ranks call it at the same point. A closed
        watch stays closed.

        Args:
            engine: The engine that replaces the watched one, such as after a rebuild.
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
        """Discard the micro-batches since the last step: they are run again, or dropped."""
        self._instrumentation.discard_window()

    def checkpoint_phase(self) -> AbstractContextManager[None]:
        """Return a context whose time counts as checkpoint time, such as a rebuild's."""
        return self._instrumentation.checkpoint_phase()

    def snapshot(self) -> Snapshot:
        """Return all metric values as they are now."""
        return self.recorder.snapshot()

    def close(
        self, *, failed: bool = False, interrupted: bool = False, at_exit: bool = False
    ) -> None:
        """Remove every hook, write what has arrived, and serve until the last scrape.

        Safe to call twice. Returns before the last scrape, except at exit.

        Args:
            failed: Whether the run ends by an exception; then no scrape is waited for.
            interrupted: Whether Ctrl-C has ended the run; then the wait is shorter.
            at_exit: Whether the process ends now; then the last scrape is waited for here.
        """
        # A later call, such as that at exit, may not know of the failure.
        self._failed = self._failed or failed
        if not self._closed:
            self._closed = True
            if failed:
                self.advisor.disable()
                self._on_run_error(sys.exc_info()[1] or getattr(sys, "last_value", None))
            self._close_hooks()
            self._close_parts(
                lambda: self._thread.enqueue(self._collectives.call_recorder.drain()),
                self._thread.stop,
                self._subscriptions.close,
                self._comparison.stop,
                self._memory.close,
            )
            self.recorder.set(training.RUN_ACTIVE, 0)
            self._close_parts(self._folder.close, self._otel.close)
            self._publish_overhead()
        if self._failed:
            self._server.close()
        elif at_exit:
            try:
                self._server.wait_for_final_scrape(interrupted=interrupted)
            finally:  # Ctrl-C ends the wait
                self._withdraw_targets()
                self._server.close()
        else:
            self._server.close_after_final_scrape(self._withdraw_targets)

    def close_after_fork(self) -> None:
        """Deactivate the watch in a forked child: close the sockets, touch no thread."""
        self._closed = True
        self._server.close()
        self._comparison.forget_hooks()
        self._otel.close_after_fork()
        self._close_hooks()

    def _close_hooks(self) -> None:
        self._close_parts(
            self._instrumentation.restore,
            self._memory.close_hooks,
            self._comparison.close_hooks,
            self._collectives.close,
        )

    def _close_parts(self, *parts: Callable[[], object]) -> None:
        """Close parts; one that fails keeps no other open."""
        for close in parts:
            self.fail_open.call("close", close)


class NullWatch:
    """Takes the place of a watch where monitoring is off or could not start. It does nothing."""

    run_id: str | None = None
    run_folder: Path | None = None
    address: str | None = None
    is_open = False

    def __init__(self) -> None:
        self.recorder = Recorder()  # nobody reads it

    def watches(self, engine: Any) -> bool:
        """Return False."""
        return False

    def subscribe(self, listener: Callable[[StepRecord], object]) -> None:
        """Never call the listener."""

    def subscribe_internal(self, listener: Callable[[StepRecord], object]) -> None:
        """Never call the listener."""

    def snapshot(self) -> Snapshot:
        """Return a snapshot without values."""
        return Snapshot(values={}, distributions={})

    def rebind_engine(self, engine: Any) -> None:
        """Set the attribute `watch` of another engine."""
        engine.watch = self

    def discard_window(self) -> None:
        """Do nothing."""

    def checkpoint_phase(self) -> AbstractContextManager[None]:
        """Return a context in which nothing is counted."""
        return nullcontext()

    def close(self) -> None:
        """Do nothing."""


# What `engine.watch` is, whether the engine is watched or not.
WatchHandle: TypeAlias = Watch | NullWatch


class EngineRef:
    """Refers weakly to the watched engine, which a rebuild replaces."""

    def __init__(self, engine: Any) -> None:
        self._engine = weakref.ref(engine)

    def __call__(self) -> Any:
        """Return the engine; None once it is gone."""
        return self._engine()

    def rebind(self, engine: Any) -> None:
        """Refer to this engine from now on."""
        self._engine = weakref.ref(engine)
