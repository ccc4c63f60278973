"""Keeps copies of a rank's states in host memory until a thread has written them to files."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ...common.peer_failures import FailureCapture
from .host_copy import host_copy, host_copy_bytes

logger = logging.getLogger(__name__)

# Part of the available memory that is left to training: its next windows may need more.
_LEFT_FREE = 1 / 8
_MEBIBYTE = 2**20

Write = Callable[[Any, Path], object]


class Snapshot:
    """Copies states on the training thread, and writes the copies on any thread.

    A state that does not fit in host memory is written at once instead of copied.

    Args:
        available_bytes: Returns the host memory that this rank may use now, in bytes.

    Attributes:
        paths: Files of the snapshot, written or not.
        num_bytes: Host memory of the copies at first, in bytes.
    """

    def __init__(self, available_bytes: Callable[[], float]) -> None:
        self.paths: list[Path] = []
        self.num_bytes = 0
        self._available_bytes = available_bytes
        self._unwritten: deque[Callable[[], object]] = deque()

    def add(self, write: Write, state: Any, path: Path) -> None:
        """Copy a state for `write(state, path)`; write it now if there is too little memory.

        Raises:
            Exception: `write` failed.
        """
        self.paths.append(path)
        needed = host_copy_bytes(state)
        usable = self._available_bytes() * (1 - _LEFT_FREE)
        reason = None
        if needed > usable:
            reason = f"{usable / _MEBIBYTE:.0f} MiB of host memory may be used"
        else:
            with FailureCapture() as capture:
                copied = host_copy(state)
            failure = capture.take()
            if failure is not None:
                reason = f"it cannot be copied ({failure})"
        if reason is not None:
            logger.warning(
                "%s is written while training waits: it has %.0f MiB, and %s",
                path.name,
                needed / _MEBIBYTE,
                reason,
            )
            write(state, path)
            return
        self.num_bytes += needed
        self._unwritten.append(partial(write, copied, path))

    def write(self) -> None:
        """Write the copies, and free the memory of each when it is written.

        Raises:
            Exception: A file cannot be written.
        """
        try:
            while self._unwritten:
                self._unwritten.popleft()()
        finally:
            self._unwritten.clear()
