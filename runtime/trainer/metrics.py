"""From what became of windows and engines to metric values."""

from __future__ import annotations

from typing import Any, Literal

from ...metrics.catalog import memory, window
from ...metrics.recorder import Recorder
from ..common.process_info import this_process
from .window.result import WindowResult

RebuildOutcome = Literal["committed", "undone", "refused"]


class TrainerMetrics:
    """Publishes what the owner of the windows tells. Every rank calls it alike."""

    def __init__(self, recorder: Recorder, rank: int, *, num_restarts: int = 0) -> None:
        """Describe the figures of a global `rank`; what all ranks do together rank 0 tells."""
        self._num_errors = 0
        self._recorder = recorder
        self._of_all = recorder if rank == 0 else Recorder()  # one that nobody reads
        with recorder.commit():  # at 0, so that the first one counts as a rise
            for outcome in window.REPLAY_OUTCOMES:
                self._of_all.add(window.WINDOW_REPLAYS, 0, outcome)
            for outcome in window.REBUILD_OUTCOMES:
                self._of_all.add(window.ENGINE_REBUILDS, 0, outcome)
            self._of_all.add(window.REPLAY_SECONDS, 0)
            self._of_all.add(window.ENGINE_REBUILD_SECONDS, 0)
            self._of_all.set(window.RESTARTS, num_restarts)

    @staticmethod
    def of_watch(watch: Any) -> TrainerMetrics:
        """Return figures that a watch serves; of a rank that the launcher has restarted or not."""
        this = this_process()
        return TrainerMetrics(watch.recorder, this.rank, num_restarts=this.attempt)

    def tell(
        self,
        result: WindowResult,
        *,
        own_samples: int,
        accumulation_steps: int,
        lost_seconds: float,
        device: str,
    ) -> None:
        """Tell all of a window that was committed."""
        self.planned(max(result.micro_batches), accumulation_steps)
        self.shared(own_samples, result.samples)
        if result.replays:
            self.aborted(lost_seconds)
        for _ in range(self._num_errors):
            self.survived(device)
        self._num_errors = 0
        self.committed(result.replays)

    def ran_out(self, error: BaseException) -> None:
        """Take note of an out-of-memory error of this rank; its window may still be done."""
        self._num_errors += 1

    def planned(self, micro_batch_samples: int, accumulation_steps: int) -> None:
        """Tell how the next window is cut: this rank's largest micro-batch, and their number."""
        with self._recorder.commit():
            self._recorder.set(window.MICRO_BATCH_SAMPLES, micro_batch_samples)
            self._of_all.set(window.ACCUMULATION_STEPS, accumulation_steps)

    def shared(self, own_samples: int, global_samples: int) -> None:
        """Tell how many of the batch's samples are this rank's."""
        self._recorder.set(window.BATCH_SHARE, own_samples / global_samples)

    def aborted(self, seconds: float) -> None:
        """Tell of an attempt at a window that was given up: what it took, cleaning up included."""
        self._of_all.add(window.REPLAY_SECONDS, seconds)

    def survived(self, device: str) -> None:
        """Tell of an out-of-memory error of this very rank whose window is done again."""
        self._recorder.add(memory.OOMS, 1, device, "replayed")

    def committed(self, num_replays: int) -> None:
        """Tell that a window was committed after so many replays, usually none."""
        self._of_all.add(window.WINDOW_REPLAYS, num_replays, "committed")

    def gave_up(self) -> None:
        """Tell that a window could not be done, after whatever was tried."""
        self._num_errors = 0
        self._of_all.add(window.WINDOW_REPLAYS, 1, "gave_up")

    def rebuilt(self, outcome: RebuildOutcome, seconds: float) -> None:
        """Tell of an engine made anew, or not, and how long training stood still for it."""
        with self._of_all.commit():
            self._of_all.add(window.ENGINE_REBUILDS, 1, outcome)
            self._of_all.add(window.ENGINE_REBUILD_SECONDS, seconds)

    def compressed(self, codec: str | None, error_ratio: float | None = None) -> None:
        """Tell what compression lost of a window's gradients; None, or no codec, if not known."""
        with self._recorder.commit():
            for other in window.COMPRESSION_FORMATS:
                if other != codec:
                    self._recorder.remove(window.COMPRESSION_ERROR, other)
            if codec in window.COMPRESSION_FORMATS and error_ratio is not None:
                self._recorder.set(window.COMPRESSION_ERROR, error_ratio, codec)
