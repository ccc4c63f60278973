"""Wraps hooks and threads to fail open: no error of monitoring reaches the training.

If a hook raises, its failure is counted and logged, and the hook is disabled. There are exceptions.
A lack of descriptors or threads or disk space is temporary, so after such an error the hook is
called again later. If the device had no memory left, the hook is called again at once. A hook whose
calls do not depend on each other loses only the call that raised.

If the work of a thread raises, the failure is counted and logged, and the thread starts over. It
starts over at most MAX_RESTARTS times.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ...metrics.backoff import Backoff
from .gil_pauses import WORK_SECONDS, pause_this_thread
from .hot_path import Hook

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

# Delay before a hook is called again after a shortage. The delay doubles up to the last value.
FIRST_RETRY_SECONDS = 10.0
LAST_RETRY_SECONDS = 300.0
# Errors that can disappear without a change of the program. MemoryError is not included: it may
# have interrupted a hook on the training thread, whose figures are then wrong.
SHORTAGES = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EAGAIN}
    | {errno.ENOSPC, errno.EDQUOT}
)
_DROPPED = "hook %r failed and was dropped; training goes on, its metrics stop. Please report this."
_DELAYED = (
    "hook %r ran short of files, threads or disk space and is called again later; training goes "
    "on, its metrics stop meanwhile."
)
_KEPT = (
    "hook %r failed and is called again; training goes on, the figures of the failed call are "
    "missing. Further failures are counted, but not logged."
)
# A thread that has failed more often than this ends.
MAX_RESTARTS = 10
# Delay before a thread starts over.
RESTART_SECONDS = 1.0


class FailOpen:
    """Wraps hooks so that their exceptions never reach the training, and counts the failures.

    Args:
        now: A monotonic clock, in seconds.

    Attributes:
        failures: Number of failed hooks and of exceptions of threads, by name. It is written on any
            thread and exported by the watch thread, so that a hook never calls the exporters
            itself.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.failures: Counter[str] = Counter()
        self._now = now
        self._threads: weakref.WeakSet[MonitoringThread] = weakref.WeakSet()

    @property
    def num_dead_threads(self) -> int:
        """The number of threads that ended although nobody stopped them."""
        return sum(thread.is_dead for thread in list(self._threads))

    def has_died(self, name: str) -> bool:
        """Whether the thread of this name ended although nobody stopped it."""
        return any(each.is_dead and each.name == name for each in list(self._threads))

    def call(self, name: str, body: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Call `body` once, with the same protection as a hook of `wrap`."""
        return self.wrap(name, body, is_retried=False)(*args, **kwargs)

    def thread(
        self,
        name: str,
        body: Callable[[], object],
        pause_seconds: float = RESTART_SECONDS,
        work_seconds: float = WORK_SECONDS,
    ) -> MonitoringThread:
        """Return a thread that starts over if its work raises. The thread is not started yet.

        Args:
            name: Failures of the thread are counted as "<name> thread".
            body: The work, which returns once its owner has stopped it. It is called again after an
                exception.
            pause_seconds: Delay before the thread starts over.
            work_seconds: CPU time after which `let_training_run` pauses the thread.
        """
        thread = MonitoringThread(name, body, self.failures, pause_seconds, work_seconds)
        self._threads.add(thread)
        return thread

    def wrap(
        self,
        name: str,
        body: Callable[P, T],
        catches: type[BaseException] = Exception,
        *,
        is_retried: bool = True,
        is_kept: bool = False,
    ) -> Callable[P, T | None]:
        """Return a function that calls `body`, and returns None from its first exception on.

        If `is_retried`, the function returns None only for a while after a shortage
        (`is_shortage`), and only for one call if the device had no memory left.

        Args:
            name: The value of the `hook` label under which a failure is counted.
            body: The hook. It must not call the training's own code.
            catches: The exception class that is caught. Use BaseException only for hooks that never
                run on a thread of the script, because the KeyboardInterrupt and SystemExit of the
                script must propagate.
            is_retried: False for a hook that must not miss a call, such as a state machine.
            is_kept: True for a hook whose calls do not depend on each other, such as reading the
                events of one batch. After any exception it is called again, and only its first
                failure is logged.
        """
        return _Failures(
            name, self.failures, self._now, is_retried=is_retried, is_kept=is_kept
        ).hook(body, catches)


class _Failures:
    """Counts and logs the failures of one hook, and decides whether it is called again."""

    def __init__(
        self,
        name: str,
        failures: Counter[str],
        now: Callable[[], float],
        *,
        is_retried: bool,
        is_kept: bool,
    ) -> None:
        self._name, self._failures = name, failures
        self._is_retried, self._is_kept = is_retried, is_kept
        self._is_dropped = self._is_logged = False
        self._backoff = Backoff(FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS, now)

    def hook(self, body: Callable[P, T], catches: type[BaseException]) -> Callable[P, T | None]:
        """Return the hook that calls `body`. It is not kept here, which would make a cycle."""
        return Hook(body, catches, self._on_failure, self._may_resume, self._on_success)

    def _on_failure(self, hook: Hook, error: BaseException) -> None:
        hook.is_off = hook.is_short = self._is_dropped = True
        self._failures[self._name] += 1
        with contextlib.suppress(Exception):  # logging can fail too, such as without memory
            text = _DROPPED
            if self._is_kept or (self._is_retried and is_out_of_device_memory(error)):
                hook.is_off, text = False, _KEPT
            elif self._is_retried and is_shortage(error):
                self._is_dropped, text = False, _DELAYED
                self._backoff.start_delay()
            if text is _DROPPED or not self._is_logged:
                self._is_logged = True
                logger.warning(text, self._name, exc_info=error)

    def _may_resume(self, hook: Hook) -> bool:
        if self._is_dropped or not self._backoff.is_due:
            return False
        hook.is_off = False
        return True

    def _on_success(self, hook: Hook) -> None:
        hook.is_short = False
        self._backoff.reset()


def is_out_of_device_memory(error: BaseException) -> bool:
    """Return whether torch raised this error because the device had no memory left.

    torch is not imported here: this module is also used before the script has imported it.
    """
    is_oom = type(error).__name__ == "OutOfMemoryError" or "error: out of memory" in str(error)
    return isinstance(error, RuntimeError) and is_oom


def is_shortage(error: BaseException) -> bool:
    """Whether an error or one of its causes is a lack of descriptors, threads or disk space."""
    behind = error
    for _ in range(10):  # a chain may have a cycle
        if isinstance(behind, OSError) and behind.errno in SHORTAGES:
            return True
        # Errors of the dynamic loader and the interpreter have no errno.
        texts = {ImportError: os.strerror(errno.EMFILE), RuntimeError: "can't start new thread"}
        if any(isinstance(behind, kind) and text in str(behind) for kind, text in texts.items()):
            return True
        earlier = behind.__cause__ or behind.__context__
        if earlier is None:
            break
        behind = earlier
    return False


class MonitoringThread:
    """Runs a daemon thread that starts over if its work raises, `SystemExit` included.

    The thread ends after MAX_RESTARTS restarts. `FailOpen.thread` creates it.

    `FailOpen` already catches the exceptions of hooks. The remaining exceptions are those set from
    another thread, an exit that a log handler requests, and errors of the loop itself.
    """

    def __init__(
        self,
        name: str,
        body: Callable[[], object],
        failures: Counter[str],
        pause_seconds: float,
        work_seconds: float,
    ) -> None:
        self.name, self._body, self._failures = name, body, failures
        self._pause_seconds, self._work_seconds = pause_seconds, work_seconds
        self._stopped, self._ended = threading.Event(), threading.Event()
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"zerowatch-{name}", daemon=True)

    @property
    def was_started(self) -> bool:
        """Whether the thread was started."""
        return self._thread.ident is not None

    @property
    def is_dead(self) -> bool:
        """Whether the thread ended before `join` was called. False in a forked child."""
        has_ended = self.was_started and not self._thread.is_alive()
        return has_ended and not self._stopped.is_set() and self._process_id == os.getpid()

    def is_alive(self) -> bool:
        """Whether the thread runs now."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: The system allows no more threads.
        """
        self._thread.start()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the body to end after it was asked to. Return whether it has ended in time.

        The result is True if the thread never ran, or if it is the caller's own thread.
        """
        self._stopped.set()
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return True
        # `Thread.join` of Python 3.11 marks the thread as ended if Ctrl-C interrupts it.
        if not self._ended.wait(timeout_seconds):
            return False
        self._thread.join()
        return True

    def _run(self) -> None:
        try:
            self._run_body()
        finally:
            self._ended.set()

    def _run_body(self) -> None:
        pause_this_thread(self._work_seconds)
        failures, error = 0, None
        while failures <= MAX_RESTARTS:
            try:
                if error is not None:  # here, as a second exception may come meanwhile
                    self._on_failure(error)
                    error = None
                    self._stopped.wait(self._pause_seconds)
                self._body()
                return
            except BaseException as raised:  # training continues
                failures, error = failures + 1, raised
        with contextlib.suppress(BaseException):
            logger.error(
                "the %s of monitoring ended after %d exceptions; training goes on, its metrics no "
                "longer change. Please report this.",
                f"{self.name} thread",
                failures,
                exc_info=error,
            )

    def _on_failure(self, error: BaseException) -> None:
        self._failures[f"{self.name} thread"] += 1
        with contextlib.suppress(Exception):
            logger.warning(
                "the %s of monitoring was interrupted by %s and starts over; training goes on. "
                "Please report this.",
                f"{self.name} thread",
                type(error).__name__,
                exc_info=error,
            )
