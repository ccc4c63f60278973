"""Recognizes Ctrl-C at the end of a process, and handles repeated Ctrl-C."""

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
