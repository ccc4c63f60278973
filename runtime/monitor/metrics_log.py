"""Writes the metrics log: every few seconds, all metrics of this rank, whatever `serve.detail`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from ...metrics.exporters.series_table import SeriesTable
from ...metrics.metrics_line import MetricsHead, MetricsLine, encode
from ...metrics.recorder import Recorder
from ...metrics.settings import Settings
from ..common.gil_pauses import let_training_run
from ..common.process_info import ProcessInfo, node_name
from .log_file import LogFile
from .step_log import keeps_every_step

# Number of lines after which a line repeats all series and values.
FULL_LINE_EVERY = 100


class MetricsLog:
    """Appends the metrics to `metrics-<r>.jsonl` from the start of the run until `close`.

    In a job of many ranks, one rank per node writes this log: those that log every step.

    Args:
        recorder: The metrics.
        settings: The settings of the run.
        process: This rank.
        run: Returns the id and the folder of the run, or None until they are known and if no run
            log is written.
        address: "host:port" at which this rank serves its metrics. None if it serves none.
        now: A monotonic clock, in seconds.
        unix_now: A clock that returns Unix seconds.
    """

    def __init__(
        self,
        recorder: Recorder,
        settings: Settings,
        process: ProcessInfo,
        run: Callable[[], tuple[str, Path] | None],
        address: str | None,
        *,
        now: Callable[[], float] = time.monotonic,
        unix_now: Callable[[], float] = time.time,
    ) -> None:
        self._recorder, self._settings, self._process = recorder, settings, process
        self._run, self._address = run, address
        self._now, self._unix_now = now, unix_now
        self._session = unix_now()
        self._interval = settings.run_log.metrics_interval_seconds
        self._is_on = self._interval > 0 and keeps_every_step(
            process.world_size, process.local_rank
        )
        self._table = SeriesTable(with_process=True)
        self._written: dict[int, float] = {}
        self._num_families = self._num_series = 0  # that the file lists
        self._number = 0
        self._due = now()
        self._cost_seconds: float | None = None
        self._file: LogFile | None = None
        self._head: MetricsHead | None = None

    @property
    def dropped(self) -> int:
        """Number of lines lost so far."""
        return 0 if self._file is None else self._file.dropped

    def poll(self) -> None:
        """Write a line if one is due. Called every second."""
        if not self._is_on or self._now() < self._due or not self._open():
            return
        self._append()
        self._due += self._interval
        if self._due <= self._now():  # what a late thread has missed is not made up for
            self._due = self._now() + self._interval

    def close(self) -> None:
        """Write the last values and close the file. Safe to call twice."""
        if self._is_on and self._open():
            self._append()
        self._is_on = False
        if self._file is not None:
            self._file.close()

    def _append(self) -> None:
        assert self._file is not None
        started_at = time.thread_time()
        self._file.append(self._line)
        self._number += 1
        self._cost_seconds = time.thread_time() - started_at

    def _open(self) -> bool:
        """Choose the file once the run is known; return whether it is."""
        if self._file is not None:
            return True
        run = self._run()
        if run is None:
            return False
        (run_id, folder), process = run, self._process
        self._file = LogFile(
            folder / f"metrics-{process.rank}.jsonl", self._settings.run_log, now=self._now
        )
        self._head = MetricsHead(
            run_id=run_id,
            rank=process.rank,
            local_rank=process.local_rank,
            world_size=process.world_size,
            host=process.host,
            node=node_name(process.host),
            instance=self._address,
            attempt=process.attempt,
            interval_seconds=self._interval,
            detail="full",
        )
        return True

    def _line(self, is_first: bool) -> bytes:
        """Return the next line. A line that could not be written makes the next one a first one."""
        snapshot = self._recorder.snapshot()
        unix_seconds = self._unix_now()
        let_training_run()
        values = self._table.values(snapshot, let_training_run)
        let_training_run()
        is_full = is_first or self._number % FULL_LINE_EVERY == 0
        if is_full:
            self._num_families = self._num_series = 0
            self._written = {}
        changed: dict[int, float | None] = {
            index: value for index, value in values.items() if self._written.get(index) != value
        }
        ended = self._written.keys() - values.keys()
        changed.update(dict.fromkeys(sorted(ended)))
        line = MetricsLine(
            session=self._session,
            number=self._number,
            unix_seconds=unix_seconds,
            head=self._head if is_full else None,
            families=self._table.families[self._num_families :],
            series=self._table.series[self._num_series :],
            values=changed,
            cost_seconds=self._cost_seconds,
        )
        let_training_run()
        self._written = values
        self._num_families, self._num_series = len(self._table.families), len(self._table.series)
        return encode(line)
