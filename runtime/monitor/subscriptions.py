"""Calls the script's listeners with each step's record, on a thread that listeners may block."""

from __future__ import annotations

import contextlib
import logging
import queue
from collections.abc import Callable

from ...metrics.step_record import StepRecord
from ..common.fail_open import FailOpen

logger = logging.getLogger(__name__)

# Maximum number of records that wait for slow listeners. Further records are dropped and counted.
MAX_WAITING = 1024
# Longest wait of `close` for listeners.
CLOSE_SECONDS = 5.0


class Subscriptions:
    """Calls the listeners of one watch on a shared thread, which starts with the first listener.

    Attributes:
        dropped: Number of records that were dropped because listeners were too slow.
    """

    def __init__(self, fail_open: FailOpen) -> None:
        self.dropped = 0
        self._fail_open = fail_open
        self._listeners: list[Callable[[StepRecord], object]] = []
        self._waiting: queue.SimpleQueue[StepRecord | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = fail_open.thread("listener", self._run)
        self._start = fail_open.wrap("listener thread", self._start_thread)

    @property
    def has_listeners(self) -> bool:
        """Whether a listener was ever added."""
        return bool(self._listeners)

    def add(self, listener: Callable[[StepRecord], object]) -> None:
        """Call `listener` from the next record on, or once the system allows another thread."""
        if not self._closed:
            self._listeners.append(self._fail_open.wrap("listener", listener, BaseException))
            self._start()

    def enqueue(self, record: StepRecord) -> None:
        """Queue a record for the listeners. Never blocks."""
        if not self._listeners or self._closed:
            return
        self._start()
        if self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(record)
            return
        if not self.dropped:
            logger.warning(
                "a listener is more than %d steps late: further records are not passed to "
                "listeners while it is, and counted. Make the listener faster.",
                MAX_WAITING,
            )
        self.dropped += 1

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Wait until the listeners have handled the queued records. Safe to call twice."""
        if self._closed:
            return
        if self._listeners:
            self._start()
        self._closed = True
        self._waiting.put(None)
        has_ended = self._thread.join(timeout_seconds)
        if has_ended and (self._thread.was_started or not self._listeners):
            return
        num_lost = 0
        with contextlib.suppress(queue.Empty):
            while self._waiting.get_nowait() is not None:
                num_lost += 1
        self._waiting.put(None)
        self.dropped += num_lost
        logger.warning(
            "a listener did not return within %g s at the end: %d record(s) were not passed to "
            "listeners",
            timeout_seconds,
            num_lost,
        )

    def _start_thread(self) -> None:
        if not self._thread.was_started:
            self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                record = self._waiting.get(timeout=1.0)
            except queue.Empty:  # a failure may have lost the item that marks the end
                if self._closed:
                    return
                continue
            if record is None:
                return
            for listener in self._listeners:
                listener(record)
