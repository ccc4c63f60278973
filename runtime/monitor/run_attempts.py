"""Records the attempts of a run in its folder, from which a restart reads when the run began."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...metrics.atomic_file import open_log
from .log_file import write_whole

logger = logging.getLogger(__name__)

ATTEMPTS_FILE = "attempts.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """When the first attempt of a run started, and the number of attempts before this one."""

    unix_seconds: float
    earlier_attempts: int

    def to_text(self) -> str:
        """Return a text from which `from_text` makes an equal object."""
        return f"{self.unix_seconds!r} {self.earlier_attempts}"

    @staticmethod
    def from_text(text: str) -> RunStart:
        """Return the object of a text."""
        unix_seconds, earlier_attempts = text.split()
        return RunStart(unix_seconds=float(unix_seconds), earlier_attempts=int(earlier_attempts))


def begin_attempt(
    folder: Path | None, *, restarts: int, now: Callable[[], float] = time.time
) -> RunStart:
    """Add this attempt to the attempts in a run folder; only rank 0 calls this function.

    The launcher counts the restarts of one job. The file also counts the jobs that were submitted
    again with the same run id.

    Args:
        folder: The run folder; None if no run log is written.
        restarts: Restarts that the launcher has counted so far.
        now: The time, in Unix seconds.
    """
    began = now()
    starts: list[float] = []
    if folder is not None:
        try:
            starts = _starts(folder / ATTEMPTS_FILE)
            _append(folder / ATTEMPTS_FILE, began)
        except OSError as error:
            logger.warning(
                "this attempt is not counted in %s: %s; a restart will not know when the run "
                "started. Training is not affected.",
                folder / ATTEMPTS_FILE,
                error,
            )
    return RunStart(unix_seconds=min([*starts, began]), earlier_attempts=max(len(starts), restarts))


def _starts(path: Path) -> list[float]:
    """Return the start of each earlier attempt. A line that a killed process cut is left out."""
    starts: list[float] = []
    if path.exists():
        for line in path.read_text(errors="replace").splitlines():
            try:
                starts.append(float(json.loads(line)["started_at_unix_seconds"]))
            except (ValueError, KeyError, TypeError):
                continue
    return starts


def _append(path: Path, began: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"started_at_unix_seconds": began}) + "\n"
    descriptor = open_log(path)
    try:
        write_whole(descriptor, line.encode())
    finally:
        os.close(descriptor)
