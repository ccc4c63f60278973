"""Recognizes Ctrl-C and other ends of a process, and handles repeated Ctrl-C."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# A launcher passes Ctrl-C on within this time, to ranks that already got it from the terminal.
PASSED_ON_SECONDS = 1.0


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an error is Ctrl-C, or the exit of a script that has caught it."""
    if isinstance(error, SystemExit):
        error = error.__context__
    return isinstance(error, KeyboardInterrupt)


def is_error_exit(error: BaseException | None) -> bool:
    """Whether an error is the exit of a process that has failed, or that SIGTERM ends.

    Lightning raises SIGTERMException then, which is a SystemExit without a status.
    """
    if not isinstance(error, SystemExit):
        return False
    return error.code not in (None, 0) or type(error).__name__ == "SIGTERMException"


@contextmanager
def ended_by_next_interrupt() -> Iterator[None]:
    """Leave the block, without an error, at the next Ctrl-C that a launcher has not passed on."""
    began = time.monotonic()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if time.monotonic() - began >= PASSED_ON_SECONDS:
            raise KeyboardInterrupt

    # A handler that the script has set is kept. Only the main thread may set a handler.
    replaces = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    try:
        if replaces:
            signal.signal(signal.SIGINT, on_signal)
        yield
    except KeyboardInterrupt:  # the process ends already
        pass
    finally:
        if replaces:
            signal.signal(signal.SIGINT, signal.default_int_handler)
