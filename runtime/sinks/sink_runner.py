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
    count, not those of the calls: a sink that was late gets the same steps.

    Args:
        sink: The destination.
        run: Returns the run. It is called before the first write.
        snapshot: Returns the metrics.
        settings: The intervals.
        now: A monotonic clock, in seconds.
    """

    def __init__(
        self,
        sink: Sink,
        run: Callable[[], SinkRun],
        snapshot: Callable[[], Snapshot],
        settings: SinksSettings,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink, self._run, self._snapshot, self._settings = sink, run, snapshot, settings
        self._backoff = Backoff(FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, now)
        self._is_open = False
        self._pending: StepRecord | None = None
        self._step_due = self._metrics_due = float("-inf")

    def on_step(self, record: StepRecord) -> None:
        """Write the values of a step, if the interval since the last one is over."""
        self._pending = record
        if record.ended_at_unix_seconds >= self._step_due and self._backoff.is_due:
            self._write_pending(with_metrics=record.ended_at_unix_seconds >= self._metrics_due)

    def close(self, *, failed: bool) -> None:
        """Write the last step with the final metrics, and close the sink."""
        try:
            if self._pending is not None:
                self._write_pending(with_metrics=True)
        finally:
            if self._is_open:
                self._sink.close(failed=failed)

    def _write_pending(self, *, with_metrics: bool) -> None:
        record, self._pending = self._pending, None
        assert record is not None
        ended_at = record.ended_at_unix_seconds
        values = step_values(record)
        if with_metrics:
            values |= metric_values(self._snapshot())
        try:
            if not self._is_open:
                self._sink.open(self._run())
                self._is_open = True
            self._sink.write(values, step=record.step, unix_seconds=ended_at)
        except BaseException:
            self._backoff.start_delay()
            raise
        self._backoff.reset()
        self._step_due = ended_at + self._settings.interval_seconds
        if with_metrics:
            self._metrics_due = ended_at + self._settings.metrics_interval_seconds
