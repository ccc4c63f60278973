"""Writes the traces of profiled steps into the run folder, and keeps the newest of each rank.

A trace is JSON for chrome://tracing, Perfetto and Holistic Trace Analysis.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "traces"
# A trace has some megabytes, so not every rank of a large job writes them.
MAX_RANKS = 8


class TraceFiles:
    """Writes the traces of one rank. Used on the watch thread.

    Args:
        folder: Returns the run folder; None until the run has an id, or without a run log.
        rank: This rank. Ranks from MAX_RANKS on write nothing.
        max_files: Number of traces to keep.
    """

    def __init__(self, folder: Callable[[], Path | None], rank: int, max_files: int) -> None:
        self._folder, self._rank = folder, rank
        self._max_files = max_files if rank < MAX_RANKS else 0
        self._written: deque[Path] | None = None

    def save(self, step: int, results: Any) -> Path | None:
        """Write the trace of a step, and remove the oldest trace if there are too many.

        Args:
            step: Number of the step.
            results: Kineto's results of its profile.

        Returns:
            The file; None if this rank writes none.

        Raises:
            OSError: The folder cannot be made.
            RuntimeError: Kineto cannot write the file.
        """
        folder = self._folder()
        if folder is None or not self._max_files:
            return None
        path = folder / FOLDER / f"rank-{self._rank}-step-{step}.pt.trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        results.save(str(path))
        if self._written is None:
            self._written = self._earlier(path.parent)
        if path in self._written:  # a step that was repeated after a resume
            self._written.remove(path)
        self._written.append(path)
        while len(self._written) > self._max_files:
            self._written.popleft().unlink(missing_ok=True)
        return path

    def _earlier(self, folder: Path) -> deque[Path]:
        """Return the traces of this rank in the folder, also of earlier attempts, oldest first."""
        found = folder.glob(f"rank-{self._rank}-step-*.pt.trace.json")
        return deque(sorted(found, key=lambda path: path.stat().st_mtime))
