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
# The same for the watch thread if another process does most of its work. Shorter pieces make that
# thread 5 % dearer. For the whole work of a watch thread they shorten no hold: it has longer parts.
SHORT_WORK_SECONDS = 0.0001
# A pause wakes up a thread that waits for the lock, even on another core.
PAUSE_SECONDS = 0.0001

_thread = threading.local()


def pause_this_thread(work_seconds: float = WORK_SECONDS) -> None:
    """From now on, `let_training_run` pauses this thread. On other threads it does nothing.

    Args:
        work_seconds: CPU time after which it pauses.
    """
    _thread.work_seconds = work_seconds
    _begin_piece()


def let_training_run() -> None:
    """Pause for a moment if this thread of monitoring has worked long enough since the last time.

    Call it between two pieces of work, and never while a lock is held. (A TrainingRun takes the
    recorder's lock in each window.)
    """
    # Reading the CPU time is a call of the kernel, and takes ten times as long as reading the time.
    # A thread cannot have worked for so long before so much time has passed.
    earliest = getattr(_thread, "earliest_pause", None)
    if earliest is None or time.monotonic() < earliest:
        return
    left = _thread.work_seconds - (time.thread_time() - _thread.began_at)
    if left > 0:
        _thread.earliest_pause = time.monotonic() + left
        return
    time.sleep(PAUSE_SECONDS)
    _begin_piece()


def _begin_piece() -> None:
    _thread.began_at = time.thread_time()
    _thread.earliest_pause = time.monotonic() + _thread.work_seconds
