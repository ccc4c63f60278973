"""Metrics of a TrainingRun: windows, replays, rebuilds and compression."""

from __future__ import annotations

from typing import Any, Literal

from ...metrics.catalog import memory, window
from ...metrics.recorder import Recorder
from ..common.process_info import this_process
from .window.step_result import StepResult

RebuildOutcome = Literal["committed", "undone", "refused"]


class RunMetrics:
    """Publishes the metrics of a TrainingRun; every rank makes the same calls.

    Events of all ranks together, such as a replay, are published by rank 0 only.

    Args:
        recorder: Recorder of the watch.
        rank: Global rank.
        num_restarts: Restarts of the job by its launcher so far.
    """

    def __init__(self, recorder: Recorder, rank: int, *, num_restarts: int = 0) -> None:
        self._num_errors = 0
        self._recorder = recorder
        self._shared_recorder = recorder if rank == 0 else Recorder()  # its values are never read
        with recorder.commit():
            self._shared_recorder.start_counters(window.ON_RANK_ZERO)
            self._shared_recorder.set(window.RESTARTS, num_restarts)

    @staticmethod
    def of_watch(watch: Any) -> RunMetrics:
        """Return metrics that the watch serves."""
        process = this_process()
        return RunMetrics(watch.recorder, process.rank, num_restarts=process.attempt)

    def publish_window(
        self,
        result: StepResult,
        *,
        own_samples: int,
        accumulation_steps: int,
        lost_seconds: float,
        device: str,
    ) -> None:
        """Publish a window that was committed."""
        self.set_micro_batch(max(result.micro_batches), accumulation_steps)
        self.set_batch_share(own_samples, result.samples)
        if result.replays:
            self.add_lost_time(lost_seconds)
        for _ in range(self._num_errors):
            self.count_survived_oom(device)
        self._num_errors = 0
        self.count_committed_window(result.replays)

    def count_oom(self, error: BaseException) -> None:
        """Count an out-of-memory error of this rank; its window may still succeed."""
        self._num_errors += 1

    def set_micro_batch(self, micro_batch_samples: int, accumulation_steps: int) -> None:
        """Publish this rank's largest micro-batch and the number of micro-batches of a window."""
        with self._recorder.commit():
            self._recorder.set(window.MICRO_BATCH_SAMPLES, micro_batch_samples)
            self._shared_recorder.set(window.ACCUMULATION_STEPS, accumulation_steps)

    def set_batch_share(self, own_samples: int, global_samples: int) -> None:
        """Publish the ratio of this rank's local batch to the global batch."""
        self._recorder.set(window.BATCH_SHARE, own_samples / global_samples)

    def add_lost_time(self, seconds: float) -> None:
        """Publish the time of a window's failed attempts, including the cleanup after them."""
        self._shared_recorder.add(window.REPLAY_SECONDS, seconds)

    def count_survived_oom(self, device: str) -> None:
        """Publish an out-of-memory error of this rank whose window succeeded in a replay."""
        self._recorder.add(memory.OOMS, 1, device, "replayed")

    def count_committed_window(self, num_replays: int) -> None:
        """Publish a window that was committed after this number of replays, usually 0."""
        self._shared_recorder.add(window.WINDOW_REPLAYS, num_replays, "committed")

    def count_failed_window(self) -> None:
        """Publish a window that failed after all replays."""
        self._num_errors = 0
        self._shared_recorder.add(window.WINDOW_REPLAYS, 1, "gave_up")

    def count_rebuild(self, outcome: RebuildOutcome, seconds: float) -> None:
        """Publish an attempted engine rebuild, and how long training paused for it."""
        with self._shared_recorder.commit():
            self._shared_recorder.add(window.ENGINE_REBUILDS, 1, outcome)
            self._shared_recorder.add(window.ENGINE_REBUILD_SECONDS, seconds)

    def set_compression_error(self, kind: str | None, error_ratio: float | None = None) -> None:
        """Publish the compression error of a window's gradients; None if it is unknown."""
        with self._recorder.commit():
            for other in window.COMPRESSION_FORMATS:
                if other != kind:
                    self._recorder.remove(window.COMPRESSION_ERROR, other)
            if kind in window.COMPRESSION_FORMATS and error_ratio is not None:
                self._recorder.set(window.COMPRESSION_ERROR, error_ratio, kind)
