"""Divides the work of zerowatch's threads, so that training does not wait for it in one piece.

A thread that runs Python code holds the interpreter lock (GIL). Another thread that wants the lock
gets it after 5 ms, or as soon as the holder waits for something. So a thread of monitoring waits
for a moment after a short piece of work. `time.sleep(0)` would not be enough: the thread would take
the lock again before another one has woken up.
"""

from __future__ import annotations

import threading
import time

# CPU time of a thread after which it pauses, at the next point at which it can.
WORK_SECONDS = 0.0003
# A pause wakes up a thread that waits for the lock, even on another core.
PAUSE_SECONDS = 0.0001

_thread = threading.local()


def pause_this_thread() -> None:
    """From now on, `let_training_run` pauses this thread. On other threads it does nothing."""
    _thread.paused_at = time.thread_time()


def let_training_run() -> None:
    """Pause for a moment if this thread of monitoring has worked for WORK_SECONDS since the last.

    Call it between two pieces of work, and never while a lock is held.
    """
    paused_at = getattr(_thread, "paused_at", None)
    if paused_at is not None and time.thread_time() - paused_at >= WORK_SECONDS:
        time.sleep(PAUSE_SECONDS)
        _thread.paused_at = time.thread_time()
