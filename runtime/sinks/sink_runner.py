"""Feeds one sink with the steps of a run: how often, with which values, and what after an error."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...metrics.backoff import Backoff
from ...metrics.recorder import Snapshot
from ...metrics.settings import SinksSettings
from ...metrics.step_record import StepRecord
from .sink import Sink, SinkRun
from .step_values import metric_values, step_values

# Delay before a sink that raised is called again. The delay doubles up to the last value.
FIRST_RETRY_SECONDS = 10.0
LAST_RETRY_SECONDS = 300.0


class SinkRunner:
    """Writes steps to one sink, at most one per interval. Used on the thread of the sinks.

    The last step of a run is always written, and the metrics with it. The times of the steps
    count, not those of the calls: a sink that was late gets the same steps. If the clock was set
    back between two steps, the second one is written with the metrics.

    Args:
        sink: The destination.
        run: Returns the run. It is called before the first write.
        snapshot: Returns the metrics.
        settings: The intervals.
        on_open: Called each time a sink has opened.
        now: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        sink: Sink,
        run: Callable[[], SinkRun],
        snapshot: Callable[[], Snapshot],
        settings: SinksSettings,
        on_open: Callable[[], object] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink, self._run, self._snapshot, self._settings = sink, run, snapshot, settings
        self._on_open = on_open
        self._backoff = Backoff(FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, now)
        self._is_open = False
        self._last: StepRecord | None = None
        self._is_written = self._has_metrics = False  # of the last step
        self._step_due = self._metrics_due = float("-inf")

    def on_step(self, record: StepRecord) -> None:
        """Write the values of a step, if the interval since the last one is over."""
        if self._last is not None and (
            record.ended_at_unix_seconds < self._last.ended_at_unix_seconds
        ):
            self._step_due = self._metrics_due = float("-inf")
        self._last, self._is_written, self._has_metrics = record, False, False
        if record.ended_at_unix_seconds >= self._step_due and self._backoff.is_due:
            self._write(record, with_metrics=record.ended_at_unix_seconds >= self._metrics_due)

    def close(self, *, failed: bool) -> None:
        """Write what is missing of the last step, with the final metrics, and close the sink."""
        try:
            if self._last is not None and not (self._is_written and self._has_metrics):
                self._write(self._last, with_metrics=True)
        finally:
            if self._is_open:
                self._sink.close(failed=failed)

    def _write(self, record: StepRecord, *, with_metrics: bool) -> None:
        ended_at = record.ended_at_unix_seconds
        values = {} if self._is_written else step_values(record)
        if with_metrics:
            values |= metric_values(self._snapshot())
        try:
            if not self._is_open:
                self._sink.open(self._run())
                self._is_open = True
                self._on_open()
            self._sink.write(values, step=record.step, unix_seconds=ended_at)
        except BaseException:
            self._backoff.start_delay()
            raise
        self._is_written, self._has_metrics = True, with_metrics
        self._backoff.reset()
        self._step_due = ended_at + self._settings.interval_seconds
        if with_metrics:
            self._metrics_due = ended_at + self._settings.metrics_interval_seconds
