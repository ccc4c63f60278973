"""Logs why a job has not reached its first step, above all a stale lock of torch's extensions.

DeepSpeed compiles its C++ operations on first use, and holds a lock file meanwhile
(`common/extension_locks.py`).
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..common.extension_locks import awaited_lock, lock_at
from ..common.fail_open import FailOpen
from .console_logging import show_own_lines

logger = logging.getLogger(__name__)

# Time without a first step, or of waiting for a lock, before the first line is logged.
FIRST_SECONDS = 20.0
# Time between two checks for a lock, as a share of the above.
_CHECKS = 4
_EXTENSION = os.path.join("torch", "utils", "cpp_extension.py")
# Frames of monitoring itself are left out: they wrap the calls of the script.
_OWN = os.path.join(str(Path(__file__).parents[1]), "")
_COMPILES = "torch compiles a C++ extension, once for this machine; that takes minutes"


class StartupMonitor:
    """Checks what the main thread waits for, on a thread of its own, until the first step.

    It does not wait for an engine that does not train, or that runs only forward passes.

    Args:
        has_stepped: Whether a step has ended.
        forward_only_ns: Returns the time in forward and evaluation; 0 after a backward pass.
        fail_open: Guards the checks.
        first_seconds: Time before a line is logged: without a step, or of waiting for one lock.
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
        self._lock: Path | None = None
        self._lock_since = 0.0
        self._place_due_at = first_seconds
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
        """Log a lock that the process waits for, and otherwise its location; each line once.

        Args:
            waited_seconds: Time since training was started.
        """
        lock = awaited_lock()
        if lock != self._lock:
            self._lock, self._lock_since = lock, waited_seconds
        if lock is not None:
            if waited_seconds - self._lock_since >= self._seconds:
                self._log_once(str(lock), logging.WARNING, _lock_line(lock), waited_seconds)
        elif waited_seconds >= self._place_due_at:
            self._place_due_at = waited_seconds + self._seconds
            forward_only_ns = self._forward_only_ns()
            evaluates = forward_only_ns > self._last_forward_only_ns
            self._last_forward_only_ns = forward_only_ns
            place = _place()
            # `deepspeed.init_distributed` compiles too, before training is initialized.
            if place == _COMPILES:
                self._log_once(place, logging.INFO, place, waited_seconds)
            elif self._is_initializing and not evaluates:
                self._log_once("", logging.INFO, place, waited_seconds)

    def _log_once(self, key: str, level: int, line: str, waited_seconds: float) -> None:
        if key in self._logged:
            return
        self._logged.add(key)
        show_own_lines()
        logger.log(level, "still before the first step after %.0f s: %s", waited_seconds, line)

    def _run(self) -> None:
        began = time.monotonic()
        while not self._stopped.wait(self._seconds / _CHECKS) and not self._has_stepped():
            self._check(time.monotonic() - began)


def _lock_line(path: Path) -> str:
    lock = lock_at(path)
    if lock.age_seconds is None:
        return f"in FileBaton.wait of torch's cpp_extension, for the lock {path}, just released"
    if lock.builders:
        state = f"process {lock.builders[0]} compiles there"
    else:
        state = (
            "no process of this machine compiles there. If none of another machine does, a killed "
            f"job has left it: stop this job, remove the lock (rm {path}), and start again"
        )
    return (
        f"in FileBaton.wait of torch's cpp_extension, for the lock {path} since {lock.age}; {state}"
    )


def _place() -> str:
    """Return the current location of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "the main thread has ended"
    innermost = script = None
    while frame is not None:
        if frame.f_code.co_filename.endswith(_EXTENSION):
            return _COMPILES
        # "<" is as in the import system of Python.
        if not frame.f_code.co_filename.startswith(("<", _OWN)):
            innermost = innermost or frame
            if script is None and frame.f_globals.get("__name__") == "__main__":
                script = frame
        frame = frame.f_back
    if innermost is None:
        return "in code without a file"
    file = Path(innermost.f_code.co_filename)
    place = f"in {innermost.f_code.co_name} ({'/'.join(file.parts[-2:])}:{innermost.f_lineno})"
    if script is None or script is innermost:
        return place
    return f"{place}, from line {script.f_lineno} of {Path(script.f_code.co_filename).name}"
