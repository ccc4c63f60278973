"""The decisions of a run on disk: one line each, whole or not at all."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from .decision import Decision
from .experiment import Conclusion
from .recorded import to_json_line

logger = logging.getLogger(__name__)

DECISIONS_FILE = "decisions.jsonl"


class Journal:
    """Appends decisions to `decisions.jsonl` in the run folder. Never raises for a disk's sake.

    Args:
        folder: Returns the run folder; None while the run has no name, or where none is written.

    Attributes:
        lost: Decisions that could not be written.
    """

    def __init__(self, folder: Callable[[], Path | None]) -> None:
        self.lost = 0
        self._folder = folder

    def write(self, decision: Decision, conclusion: Conclusion) -> None:
        """Write a decision, and what it was made from, in one piece."""
        folder = self._folder()
        if folder is None:
            self.lost += 1
            return
        line = to_json_line(decision, conclusion)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _append(folder / DECISIONS_FILE, line)
        except OSError as error:
            if not self.lost:
                logger.warning(
                    "cannot write %s: %s; the tuner goes on, its decisions are told in the log",
                    folder / DECISIONS_FILE,
                    error,
                )
            self.lost += 1


def _append(path: Path, line: bytes) -> None:
    """Write by one call; what a killed process or a full disk left of a line ends there."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        whole = b"\n" + line if is_torn else line
        if os.write(descriptor, whole) < len(whole):
            os.ftruncate(descriptor, size)
            raise OSError("only a part of the line fitted")
    finally:
        os.close(descriptor)
