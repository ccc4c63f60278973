"""Calls functions that may block in the device's driver, and waits for them for a limited time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from ...common.fail_open import FailOpen

T = TypeVar("T")

# Longest wait for a call. A query of an event takes some microseconds unless the driver blocks.
CALL_SECONDS = 2.0


class DriverCalls:
    """Calls functions on a thread of its own, which is started before a hang.

    A query of an event blocks while another thread holds the lock of the device's context, as a
    thread of the script may do while it waits for the device. On a new thread, the first call of
    the driver would block with the interpreter lock held. Without the thread, the caller's thread
    calls.
    """

    def __init__(self, fail_open: FailOpen, prepare_thread: Callable[[], object]) -> None:
        """Create the thread.

        Args:
            fail_open: Starts the thread over if it is interrupted.
            prepare_thread: Lets the thread query events.
        """
        self._prepare_thread = prepare_thread
        self._waiting: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._late: Future[Any] | None = None
        self._thread = fail_open.thread("hang-driver", self._run)

    @property
    def is_blocked(self) -> bool:
        """Whether a call has not returned in time and has not returned since."""
        return self._late is not None and not self._late.done()

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: The system allows no more threads.
        """
        self._thread.start()

    def close(self) -> None:
        """End the thread. A thread that is blocked ends later."""
        if self._thread.is_alive():
            self._waiting.put(None)
        self._thread.join(0.0 if self.is_blocked else CALL_SECONDS)

    def call(self, body: Callable[[], T | None]) -> T | None:
        """Return the result of a function that does not raise; None if the driver blocks."""
        if not self._thread.is_alive():
            return body()
        if self.is_blocked:
            return None
        answer: Future[T | None] = Future()
        self._waiting.put((body, answer))
        try:
            return answer.result(CALL_SECONDS)
        except TimeoutError:
            self._late = answer
            return None

    def _run(self) -> None:
        self._prepare_thread()
        while (each := self._waiting.get()) is not None:
            body, answer = each
            result = None
            try:
                result = body()
            finally:  # else the driver would count as blocked for ever
                answer.set_result(result)
