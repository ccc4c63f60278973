"""Writes metrics logs as a rank would, with a clock of its own, for tests of what reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import Settings
from zerowatch.runtime.common.process_info import ProcessInfo
from zerowatch.runtime.monitor.metrics_log import MetricsLog

STARTED = 1_790_000_000.0


class RecordedRank:
    """A rank that writes a line of its metrics log with each `tick`.

    Attributes:
        recorder: The metrics of the rank.
        seconds: The time since the start of the run.
        path: The current segment of the log.
    """

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        *,
        attempt: int = 0,
        world_size: int = 2,
        local_rank: int | None = None,
        begins_at: float = 0.0,
        started: float = STARTED,
        address: str | None = "127.0.0.1:9464",
        serve: dict[str, Any] | None = None,
        **run_log: Any,
    ) -> None:
        self.recorder = Recorder()
        self.seconds = begins_at
        self.path = folder / f"metrics-{rank}.jsonl"
        settings = Settings(
            run_id=folder.name, run_log={"folder": folder.parent, **run_log}, serve=serve or {}
        )
        self.interval = settings.run_log.metrics_interval_seconds
        process = ProcessInfo(
            rank=rank,
            local_rank=rank if local_rank is None else local_rank,
            world_size=world_size,
            host="here",
            attempt=attempt,
        )
        self.log = MetricsLog(
            self.recorder,
            settings,
            process,
            lambda: (folder.name, folder),
            address,
            now=lambda: self.seconds,
            unix_now=lambda: started + self.seconds,
        )

    def tick(self, seconds: float | None = None) -> None:
        """Let the watch thread poll the log, then let time pass: by default one interval."""
        self.log.poll()
        self.seconds += self.interval if seconds is None else seconds

    def __enter__(self) -> RecordedRank:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.close()
