"""Fail-open hooks and threads: no error of monitoring reaches the training.

A hook that raises is counted, logged and disabled. A thread whose work raises is counted, logged
and starts over.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

# A thread that has failed more often ends.
MAX_RESTARTS = 10
# Delay before a thread starts over.
RESTART_SECONDS = 1.0


class FailOpen:
    """Wraps hooks so that their exceptions never reach the training, and counts those that failed.

    Attributes:
        failures: Number of failed hooks and of exceptions of threads, by name. It is written on any
            thread and exported by the watch thread, so that a hook never calls the exporters
            itself.
    """

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self._threads: weakref.WeakSet[MonitoringThread] = weakref.WeakSet()

    @property
    def num_dead_threads(self) -> int:
        """How many threads ended although nobody has stopped them."""
        return sum(thread.is_dead for thread in list(self._threads))

    def thread(
        self, name: str, body: Callable[[], object], pause_seconds: float = RESTART_SECONDS
    ) -> MonitoringThread:
        """Return a thread, not started yet, that starts over if its work raises.

        Args:
            name: Its failures are counted as "<name> thread".
            body: Returns once its owner has stopped it. It is called again after an exception.
            pause_seconds: Delay before it starts over.
        """
        thread = MonitoringThread(name, body, self.failures, pause_seconds)
        self._threads.add(thread)
        return thread

    def wrap(
        self,
        name: str,
        body: Callable[P, T],
        catches: type[BaseException] = Exception,
    ) -> Callable[P, T | None]:
        """Return a function that calls `body`, and returns None from its first exception on.

        Args:
            name: The value of the `hook` label under which a failure is counted.
            body: The hook. It must not call the training's own code.
            catches: What is caught. BaseException only for what never runs on a thread of the
                script, whose KeyboardInterrupt and SystemExit must pass.
        """
        dropped = False

        def guarded(*args: P.args, **kwargs: P.kwargs) -> T | None:
            nonlocal dropped
            if dropped:
                return None
            try:
                return body(*args, **kwargs)
            except catches:  # training continues
                dropped = True
                self.failures[name] += 1
                with contextlib.suppress(Exception):  # logging can fail too, such as without memory
                    logger.warning(
                        "hook %r failed and was dropped; training goes on, its metrics stop. "
                        "Please report this.",
                        name,
                        exc_info=True,
                    )
                return None

        return guarded


class MonitoringThread:
    """A daemon thread that starts over if its work raises anything, `SystemExit` included.

    Hooks that raise are dropped by `FailOpen` before that. What is left are exceptions set from
    another thread, an exit asked for in a log handler, and errors of the loop itself.
    `FailOpen.thread` makes it.
    """

    def __init__(
        self,
        name: str,
        body: Callable[[], object],
        failures: Counter[str],
        pause_seconds: float,
    ) -> None:
        self._name, self._body, self._failures = f"{name} thread", body, failures
        self._pause_seconds = pause_seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"zerowatch-{name}", daemon=True)

    @property
    def was_started(self) -> bool:
        """Whether the thread runs or ran."""
        return self._thread.ident is not None

    @property
    def is_dead(self) -> bool:
        """Whether it has ended before `join` was called."""
        return self.was_started and not self._thread.is_alive() and not self._stopped.is_set()

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
        """Wait for the end of the body, which was told to end; return whether it came.

        It has come if the thread never ran, or if it is the caller's own.
        """
        self._stopped.set()
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
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
                self._name,
                failures,
                exc_info=error,
            )

    def _on_failure(self, error: BaseException) -> None:
        self._failures[self._name] += 1
        with contextlib.suppress(Exception):
            logger.warning(
                "the %s of monitoring was interrupted by %s and starts over; training goes on. "
                "Please report this.",
                self._name,
                type(error).__name__,
                exc_info=error,
            )
