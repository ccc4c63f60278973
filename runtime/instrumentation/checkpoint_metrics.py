"""Counts the checkpoints that a script or a TrainingRun saves, and their time."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ...metrics.catalog import training
from ...metrics.exporters.scrape_tracker import ASSUMED_INTERVAL_SECONDS
from ...metrics.recorder import Recorder
from ..common.fail_open import FailOpen
from ..common.phase_timer import PhaseTimer


class _Calls(threading.local):
    """The calls that this thread is in, and when the outer one began."""

    depth = 0
    began = 0.0


class CheckpointMetrics:
    """Counts checkpoints, and their time on the training thread.

    A TrainingRun saves a checkpoint by the engine's own method. Only the outer call is counted. If
    it only copies the state, the checkpoint counts as saved when a thread has written it.
    """

    def __init__(self, recorder: Recorder, fail_open: FailOpen, phase_timer: PhaseTimer) -> None:
        self._recorder = recorder
        self._phase_timer = phase_timer
        self._calls = _Calls()
        self._failed_at = -math.inf
        self.begin = fail_open.wrap("checkpoint metrics", self._begin)
        self.end = fail_open.wrap("checkpoint metrics", self._end)
        self.written = fail_open.wrap("checkpoint metrics", self._written)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Return a context manager in which one checkpoint is saved; an error counts as failed."""
        self.begin()
        saved = False
        try:
            yield
            saved = True
        finally:
            self.end(saved=saved)

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Return a context manager in which a state is copied; only an error counts as an end."""
        self.begin()
        copied = False
        try:
            yield
            copied = True
        finally:
            self.end(saved=None if copied else False)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context manager in which training waits for the thread that writes."""
        self.begin()
        try:
            yield
        finally:
            self.end(saved=None)

    def failed_lately(self) -> bool:
        """Return whether saving failed within the last minute: no scrape may have read it."""
        return time.monotonic() - self._failed_at < ASSUMED_INTERVAL_SECONDS

    def _written(self, *, saved: bool, seconds: float, began_at: float) -> None:
        recorder = self._recorder
        with recorder.commit():
            self._count(saved=saved)
            recorder.add(training.CHECKPOINT_BACKGROUND_SECONDS, seconds)
            if saved:
                recorder.set(training.LAST_CHECKPOINT_TIMESTAMP, began_at)

    def _count(self, *, saved: bool) -> None:
        self._recorder.add(training.CHECKPOINTS, 1, "saved" if saved else "failed")
        if not saved:
            self._failed_at = time.monotonic()

    def _begin(self) -> None:
        calls = self._calls
        calls.depth += 1
        if calls.depth == 1:
            calls.began = time.perf_counter()

    def _end(self, *, saved: bool | None) -> None:
        calls = self._calls
        calls.depth -= 1
        if calls.depth:
            return
        recorder = self._recorder
        with recorder.commit():
            if saved is not None:
                self._count(saved=saved)
            if self._phase_timer.is_on_training_thread():
                recorder.add(training.CHECKPOINT_SECONDS, time.perf_counter() - calls.began)
            if saved:
                recorder.set(training.LAST_CHECKPOINT_TIMESTAMP, time.time())
