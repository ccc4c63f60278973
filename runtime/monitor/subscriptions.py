"""Calls listeners with each step's record, on a thread that listeners may block."""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from ...metrics.step_record import StepRecord
from ..common.fail_open import FailOpen
from ..common.gil_pauses import let_training_run

logger = logging.getLogger(__name__)

# Maximum number of records that wait for slow listeners. Further records are dropped and counted.
MAX_WAITING = 1024
# Longest wait of `close` for listeners.
CLOSE_SECONDS = 5.0


# A record, a call, or None at the end.
_Item: TypeAlias = StepRecord | Callable[[], object] | None


def for_each(listener: Callable[[StepRecord], object]) -> Callable[[Sequence[StepRecord]], None]:
    """Return a function that calls a listener with each of several records."""

    def call(records: Sequence[StepRecord]) -> None:
        for record in records:
            listener(record)
            let_training_run()

    return call


class Subscriptions:
    """Calls the listeners of one watch on a shared thread, which starts with the first listener.

    Args:
        fail_open: Counts failures, and makes the thread.
        kind: What the listeners are, in log lines and as the name of the thread.
        advice: What to do about a slow listener, in a log line.
        max_waiting: Maximum number of records and calls that wait. Further ones are dropped.
        max_bytes: Memory of the waiting calls from which further ones that need some are dropped.
        on_idle: Called on the thread whenever nothing waits, and before it ends. It must not raise.
        num_held: Returns how many of the calls that have returned still need `on_idle`.

    Attributes:
        dropped: Number of records and calls that were dropped because listeners were too slow.
    """

    def __init__(
        self,
        fail_open: FailOpen,
        kind: str = "listener",
        advice: str | None = None,
        *,
        max_waiting: int = MAX_WAITING,
        max_bytes: float = math.inf,
        on_idle: Callable[[], object] = lambda: None,
        num_held: Callable[[], int] = lambda: 0,
    ) -> None:
        self.dropped = 0
        self._max_waiting, self._max_bytes = max_waiting, max_bytes
        self._num_put_bytes = self._num_taken_bytes = 0  # each is counted by one side
        self._on_idle, self._num_held = on_idle, num_held
        self._fail_open, self._kind = fail_open, kind
        self._advice = advice or f"Make the {kind} faster."
        self._ends: list[Callable[[], object]] = []
        self._listeners: list[Callable[[StepRecord], object]] = []
        self._waiting: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._closed = self._has_waited = False
        self._thread = fail_open.thread(kind, self._run)
        self._starting = threading.RLock()
        self._start = fail_open.wrap(f"{kind} thread", self._start_thread)

    @property
    def has_listeners(self) -> bool:
        """Whether a listener was ever added."""
        return bool(self._listeners)

    def add(self, listener: Callable[[StepRecord], object]) -> None:
        """Call `listener` from the next record on, or once the system allows another thread."""
        if not self._closed:
            self._listeners.append(self._fail_open.wrap("listener", listener, BaseException))
            self._start()

    def add_kept(
        self, name: str, listener: Callable[[StepRecord], object], on_end: Callable[[], object]
    ) -> None:
        """Call `listener` from the next record on, also after it raised, and `on_end` at the end.

        Args:
            name: The name under which failures are counted.
            listener: Gets each record.
            on_end: Called by `close` after the last record, on the same thread.
        """
        if not self._closed:
            # One hook for both: an end that fails like the calls before it is not logged again.
            call = self._fail_open.wrap(name, _call, BaseException, is_kept=True)
            self._listeners.append(lambda record: call(partial(listener, record)))
            self._ends.append(lambda: call(on_end))
            self._start()

    def enqueue(self, record: StepRecord) -> None:
        """Queue a record for the listeners. Never blocks."""
        if self._listeners:
            self._put(record)

    def enqueue_call(self, call: Callable[[], object], num_bytes: int = 0) -> None:
        """Queue a function to be called once, which must not raise. Never blocks.

        Args:
            call: The function.
            num_bytes: The memory that it needs while it waits.
        """
        self._put(partial(self._take_call, call, num_bytes) if num_bytes else call, num_bytes)

    def call_at_end(self, name: str, call: Callable[[], object]) -> None:
        """Call a function on the thread when it ends. A failure is counted under the name."""
        self._ends.append(self._fail_open.wrap(name, call, BaseException))

    def _put(self, record: StepRecord | Callable[[], object], num_bytes: int = 0) -> None:
        if self._closed:
            return
        self._start()
        num_waiting = self._waiting.qsize()
        has_memory = self._num_put_bytes - self._num_taken_bytes < self._max_bytes
        if num_waiting < self._max_waiting and (has_memory or not num_bytes):
            self._num_put_bytes += num_bytes
            self._waiting.put(record)
            return
        if not self.dropped:
            logger.warning(
                "a %s is %d records late: further records are not passed on while it is, and "
                "counted. %s",
                self._kind,
                num_waiting,
                self._advice,
            )
        self.dropped += 1

    def _take_call(self, call: Callable[[], object], num_bytes: int) -> None:
        self._num_taken_bytes += num_bytes
        call()

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Wait until the listeners have handled the queued records.

        Safe to call twice. If Ctrl-C ends the wait, the next call waits again.
        """
        if self._has_waited:
            return
        if not self._closed:
            if self._listeners or not self._waiting.empty():
                self._start()
            self._closed = True
            self._waiting.put(None)
        has_ended = self._thread.join(timeout_seconds)
        self._has_waited = True
        if has_ended and (self._thread.was_started or not self._listeners):
            return
        num_lost = self._num_held()
        with contextlib.suppress(queue.Empty):
            while self._waiting.get_nowait() is not None:
                num_lost += 1
        self._waiting.put(None)
        self.dropped += num_lost
        logger.warning(
            "a %s did not return within %g s at the end: %d record(s) were not passed on",
            self._kind,
            timeout_seconds,
            num_lost,
        )

    def _start_thread(self) -> None:
        if self._thread.was_started:
            return
        with self._starting:  # `Thread.start` would start two threads if two called it at once
            if not self._thread.was_started:
                self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                record = self._waiting.get(timeout=1.0)
            except queue.Empty:  # a failure may have lost the item that marks the end
                if self._closed:
                    break
                continue
            if record is None:
                break
            if callable(record):
                record()
            else:
                for listener in self._listeners:
                    listener(record)
            if self._waiting.empty():
                self._on_idle()
        self._on_idle()
        for end in self._ends:
            end()


def _call(body: Callable[[], object]) -> None:
    body()
