"""Logs why a job has not reached its first step, above all a stale lock of torch's extensions.

DeepSpeed compiles its C++ operations on first use, and holds a lock file meanwhile. A job that is
killed during the compilation leaves the lock file behind. Every later job then waits forever for
the lock, without a message.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from ..common.fail_open import FailOpen
from .console_logging import show_own_lines

logger = logging.getLogger(__name__)

# Time without a first step before the first line is logged. Also the time between two checks.
FIRST_SECONDS = 30.0
_BATON = os.path.join("torch", "utils", "file_baton.py")
_EXTENSION = os.path.join("torch", "utils", "cpp_extension.py")


class StartupMonitor:
    """Checks what the main thread waits for, on a thread of its own, until the first step.

    It does not wait for an engine that does not train, or that runs only forward passes.

    Args:
        has_stepped: Whether a step has ended.
        forward_only_ns: Returns the time in forward and evaluation; 0 after a backward pass.
        fail_open: Guards the checks.
        first_seconds: Time before the first check, and between two checks.
    """

    def __init__(
        self,
        has_stepped: Callable[[], bool],
        forward_only_ns: Callable[[], int],
        fail_open: FailOpen,
        first_seconds: float = FIRST_SECONDS,
    ) -> None:
        self._has_stepped, self._forward_only_ns = has_stepped, forward_only_ns
        self._last_forward_only_ns = 0
        self._check = fail_open.wrap("startup", self.check)
        self._seconds = first_seconds
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_initializing = False
        self._logged: set[str] = set()

    def start(self, *, initializing: bool = False) -> None:
        """Start checking. A second call only notes that training is being initialized.

        Does nothing on ranks that are not the first of their node, and after `stop`.
        """
        self._is_initializing = self._is_initializing or initializing
        if self._thread is None and os.environ.get("LOCAL_RANK", "0") == "0":
            self._thread = threading.Thread(target=self._run, name="zerowatch-startup", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # the system allows no more threads
                logger.info("the start of training is not monitored: %s", error)

    def expect_no_step(self) -> None:
        """Report only locks from now on, because the new engine does not train."""
        self._is_initializing = False

    def stop(self) -> None:
        """Stop checking. Safe to call twice."""
        self._stopped.set()

    def check(self, waited_seconds: float) -> None:
        """Log each lock that the process waits for, and otherwise its location; each line once."""
        lock, forward_only_ns = awaited_lock(), self._forward_only_ns()
        evaluates = forward_only_ns > self._last_forward_only_ns
        self._last_forward_only_ns = forward_only_ns
        if lock is not None:
            self._log_once(str(lock), logging.WARNING, _lock_line(lock), waited_seconds)
        elif self._is_initializing and not evaluates:
            self._log_once("", logging.INFO, _place(), waited_seconds)

    def _log_once(self, key: str, level: int, line: str, waited_seconds: float) -> None:
        if key in self._logged:
            return
        self._logged.add(key)
        show_own_lines()
        logger.log(level, "still before the first step after %.0f s: %s", waited_seconds, line)

    def _run(self) -> None:
        began = time.monotonic()
        while not self._stopped.wait(self._seconds) and not self._has_stepped():
            self._check(time.monotonic() - began)


def awaited_lock() -> Path | None:
    """Return the lock file of torch's extensions that a thread waits for, or None."""
    for frame in sys._current_frames().values():
        code = frame.f_code
        if code.co_name == "wait" and code.co_filename.endswith(_BATON):
            return Path(frame.f_locals["self"].lock_file_path)
    return None


def _lock_line(lock: Path) -> str:
    try:
        age_seconds = max(0.0, time.time() - lock.stat().st_mtime)
    except OSError:
        return f"in FileBaton.wait of torch's cpp_extension, for the lock {lock}, just released"
    workers = list(_processes_in(lock.parent))
    if workers:
        state = f"process {workers[0]} compiles there"
    else:
        state = (
            "no process of this machine compiles there. If none of another machine does, a killed "
            f"job has left it: stop this job, remove the lock (rm {lock}), and start again"
        )
    return (
        f"in FileBaton.wait of torch's cpp_extension, for the lock {lock} since "
        f"{_age(age_seconds)}; {state}"
    )


def _processes_in(folder: Path) -> Iterator[int]:
    """Yield the processes whose working folder is `folder`, such as ninja and its compilers."""
    for process in psutil.process_iter(["cwd"]):
        if process.info["cwd"] == str(folder) and process.pid != os.getpid():
            yield process.pid


def _place() -> str:
    """Return the current location of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "the main thread has ended"
    innermost = frame
    while frame is not None:
        if frame.f_code.co_filename.endswith(_EXTENSION):
            return "torch compiles a C++ extension, once for this machine; that takes minutes"
        frame = frame.f_back
    file = Path(innermost.f_code.co_filename)
    where = "/".join(file.parts[-2:])
    return f"in {innermost.f_code.co_name} ({where}:{innermost.f_lineno})"


def _age(seconds: float) -> str:
    hours, minutes = int(seconds // 3600), int(seconds % 3600 // 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {int(seconds % 60)} s"
