"""Remembers what went wrong within steps, until the traces of those steps are made."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...metrics.exporters.log_capture import utf8_text

# Maximum number of errors that wait for the end of their step.
MAX_ERRORS = 64
MAX_MESSAGE = 1000

ErrorKind = Literal["out_of_memory", "hang", "window_discarded", "run_failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepError:
    """An error within a step.

    Attributes:
        kind: What happened.
        unix_ns: When it happened, in Unix nanoseconds.
        type_name: The full name of the exception class, or a name for an error without exception.
        message: The message, cut to MAX_MESSAGE characters.
    """

    kind: ErrorKind
    unix_ns: int
    type_name: str
    message: str


class StepErrors:
    """The errors of steps whose traces are not made yet. Safe to use from any thread.

    Args:
        unix_ns: A clock that returns Unix nanoseconds.

    Attributes:
        on_hang: Called with each hang, because the step of a hang may never end.
    """

    def __init__(self, unix_ns: Callable[[], int] = time.time_ns) -> None:
        self._unix_ns = unix_ns
        self._lock = threading.Lock()
        self._errors: deque[StepError] = deque(maxlen=MAX_ERRORS)
        self.on_hang: Callable[[StepError], object] = lambda _: None

    def add(self, kind: ErrorKind, type_name: str, message: str) -> None:
        """Add an error that happens now."""
        error = StepError(
            kind=kind,
            unix_ns=self._unix_ns(),
            type_name=type_name,
            message=utf8_text(message)[:MAX_MESSAGE],  # a trace encodes it
        )
        with self._lock:
            self._errors.append(error)
        if kind == "hang":
            self.on_hang(error)

    def add_exception(self, kind: ErrorKind, error: BaseException) -> None:
        """Add an exception that is raised now. No reference to the exception is kept."""
        self.add(kind, exception_name(error), str(error))

    def take(self, since_unix_ns: int, until_unix_ns: int) -> list[StepError]:
        """Remove and return the errors of an interval, oldest first."""
        with self._lock:
            taken = [e for e in self._errors if since_unix_ns <= e.unix_ns <= until_unix_ns]
            for error in taken:
                self._errors.remove(error)
        return taken


def exception_name(error: BaseException) -> str:
    """Return the full name of an exception's class, as OpenTelemetry's conventions ask."""
    kind = type(error)
    is_builtin = kind.__module__ == "builtins"
    return kind.__qualname__ if is_builtin else f"{kind.__module__}.{kind.__qualname__}"
