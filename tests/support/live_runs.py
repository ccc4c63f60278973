"""A live page with a server and figures of a run, without training."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from recorded_runs import step_record

from zerowatch.metrics.catalog import communication, memory, training, tuner
from zerowatch.metrics.exporters.server import MetricsServer
from zerowatch.metrics.recorder import Recorder
from zerowatch.metrics.settings import ServeSettings
from zerowatch.runtime.common.fail_open import FailOpen
from zerowatch.runtime.live_page.live_page import LivePage

RUN_ID = "night-7"


class LiveRun:
    """A run whose steps the test adds, and the server of its rank 0.

    Attributes:
        address: "host:port" of the server.
        fail_open: Counts failures of the page.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        unix_now: Callable[[], float] = time.time,
        **settings: object,
    ) -> None:
        self.recorder, self.fail_open = Recorder(), FailOpen()
        self.page = LivePage(
            recorder=self.recorder,
            thresholds={},
            run_id=lambda: RUN_ID,
            folder=lambda: folder,
            targets=self.targets,
            read=lambda body: self.fail_open.wrap("live page", body, is_kept=True),
            unix_now=unix_now,
        )
        self.server = MetricsServer(
            recorder=self.recorder,
            rank=0,
            local_rank=0,
            settings=ServeSettings(**{"port": 0, "linger_seconds": 0, **settings}),
            targets=self.targets,
            make_thread=self.fail_open.thread,
            pages=self.page.pages,
        )
        self._set_figures()
        self.steps = 0
        self.address = self.server.start() or ""

    def targets(self) -> list[dict[str, object]]:
        """Two ranks on one node."""
        return [
            {
                "targets": [f"127.0.0.1:{9464 + rank}"],
                "labels": {"run": RUN_ID, "node": "node-0", "rank": str(rank)},
            }
            for rank in range(2)
        ]

    def add_steps(self, count: int, *, ended_at: float | None = None, **changes: object) -> None:
        """Train for some steps, the last of which ends at a Unix time, by default now."""
        last = time.time() if ended_at is None else ended_at
        for number in range(1, count + 1):
            self.steps += 1
            at = last - 0.5 * (count - number)
            fields = {"ended_at_unix_seconds": at, "comm_exposed_seconds": 0.1, **changes}
            record = step_record(self.steps, **fields)
            self.page.on_steps([record])
            with self.recorder.commit():
                self.recorder.add(training.STEPS, 1)
                self.recorder.set(training.LOSS, record.loss or 0.0)
                self.recorder.set(training.LAST_STEP_TIMESTAMP, at)
                for phase, seconds in record.phase_seconds.items():
                    self.recorder.add(training.PHASE_SECONDS, seconds, phase)
                self.recorder.add(communication.COMM_EXPOSED_SECONDS, 0.1, "dp")
                self.recorder.add(communication.COMM_CAUSE_SECONDS, 0.075, "imbalance")
                self.recorder.add(communication.COMM_CAUSE_SECONDS, 0.025, "bandwidth")

    def end(self, reason: str = "completed") -> None:
        """End the run, and close the server."""
        self.recorder.set(training.RUN_ACTIVE, 0)
        self.recorder.set_info(training.RUN_END_INFO, reason)
        self.close()

    def close(self) -> None:
        """Close the server."""
        self.server.close()

    def _set_figures(self) -> None:
        recorder = self.recorder
        recorder.set(training.RUN_ACTIVE, 1)
        info = (RUN_ID, "0.1.0", "2.9.0", "0.19.3", "gloo", "cpu", "2", "2")
        recorder.set_info(training.RUN_INFO, *info)
        recorder.set(training.RUN_START_TIMESTAMP, time.time() - 600)
        recorder.set(training.WORLD_SIZE, 2)
        recorder.set(training.STEP_DURATION_QUANTILE, 0.5, "0.5")
        recorder.set(memory.MEMORY_BYTES, 600e6, "cpu", "allocated")
        recorder.set(memory.MEMORY_PEAK, 650e6, "cpu", "allocated")
        recorder.set(memory.MEMORY_LIMIT, 2e9, "cpu")
        recorder.set(memory.OOM_RISK, 0.02, "cpu")
        recorder.set(memory.MEMORY_BASELINE, 300e6, "cpu")
        sizes = {"parameters": 50e6, "gradients": 50e6, "optimizer": 100e6, "activations": 80e6}
        for category, size in sizes.items():
            recorder.set(memory.MEMORY_CATEGORY_BYTES, size, "cpu", category)
        recorder.set(communication.COMM_COVERAGE_RATIO, 1.0)
        recorder.set(tuner.TUNER_STATE, 1, "observe")
        recorder.set(tuner.TUNER_KNOB_VALUE, 5e8, "reduce_bucket_size")
        self.page.figures = lambda: {
            0: {"step_duration": 0.5, "comm_wait": 0.15, "exposed_comm": 0.2, "oom_risk": 0.02},
            1: {"step_duration": 0.5, "comm_wait": 0.01, "exposed_comm": 0.05, "oom_risk": 0.03},
        }
        self.page.slow = lambda: {1: {"backward": 0.21}}
