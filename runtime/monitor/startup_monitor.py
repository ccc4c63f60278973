"""Logs where a job is that takes no first step, above all at a stale lock of torch's extensions.

DeepSpeed compiles its C++ operations on first use, under a lock file. A job that was killed during
that leaves the lock, and every later job waits for it forever, without a message.
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

# Time without a first step after which the first line is logged, and between two checks.
FIRST_SECONDS = 30.0
_BATON = os.path.join("torch", "utils", "file_baton.py")
_EXTENSION = os.path.join("torch", "utils", "cpp_extension.py")


class StartupMonitor:
    """Checks on a thread of its own, until the first step, what the main thread waits for.

    An engine that does not train, or of which only forward passes are seen, is not waited for.

    Args:
        has_stepped: Whether a step has ended.
        forward_only_ns: Returns the time of forward passes and evaluations; 0 after a backward.
        fail_open: Guards the checks.
        first_seconds: Time before the first check, and between two.
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
        """Start checking; a second call only adds that training is being initialized.

        Does nothing on other ranks than the first of a node, and once stopped.
        """
        self._is_initializing = self._is_initializing or initializing
        if self._thread is None and os.environ.get("LOCAL_RANK", "0") == "0":
            self._thread = threading.Thread(target=self._run, name="zerowatch-startup", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # the limit of threads
                logger.info("the start of training is not monitored: %s", error)

    def expect_no_step(self) -> None:
        """Report only locks from now on, as the engine that was made does not train."""
        self._is_initializing = False

    def stop(self) -> None:
        """Stop checking. Safe to call twice."""
        self._stopped.set()

    def check(self, waited_seconds: float) -> None:
        """Log once for each lock, and once in all, where the process is."""
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
    """Return the lock file of torch's extensions that a thread waits for."""
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
    """Yield the processes that work in a folder, as ninja and its compilers do."""
    for process in psutil.process_iter(["cwd"]):
        if process.info["cwd"] == str(folder) and process.pid != os.getpid():
            yield process.pid


def _place() -> str:
    """Return where the main thread is."""
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
