"""Writes the step log: one line of JSON per step. A disk error never raises."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ...metrics.atomic_file import open_to_append
from ...metrics.settings import RunLogSettings, Settings
from ...metrics.step_record import LineWriter, StepRecord
from ..common.report_files import write_or_warn

logger = logging.getLogger(__name__)

# Delay after a disk error before the next try.
RETRY_SECONDS = 10.0
# Number of ranks up to which each rank writes every step.
FULL_LOG_WORLD_SIZE = 64
# With more ranks, all but one per node write each step with a multiple of this number.
THINNED_EVERY = 10


class StepLog:
    """Appends step records to `rank-<r>.jsonl`.

    Each line is one write, so that a killed process loses at most the step in flight. If the file
    is deleted or renamed, the log goes on in a new one of its name. Above FULL_LOG_WORLD_SIZE ranks
    only one rank per node writes every step.

    Attributes:
        dropped: Records that could not be written, or were in a file that was deleted.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, str | int],
        settings: RunLogSettings,
        *,
        every_step: bool = True,
        on_deleted: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the log; the file is opened by the first record.

        Args:
            folder: The run folder.
            identity: Fields of every record; `rank` is in the file's name.
            settings: Size and number of segments.
            every_step: Whether to keep every step or every tenth.
            on_deleted: Called after the file was deleted; the folder may be gone as well.
            now: A monotonic clock, in seconds.
        """
        self.path = folder / f"rank-{identity['rank']}.jsonl"
        self.dropped = 0
        self._writer = LineWriter(identity)
        self._settings = settings
        self._every_step = every_step
        self._now = now
        self._descriptor: int | None = None
        self._bytes = self._records = 0  # of the file, and of those records this process's
        self._retry_at = 0.0
        self._warned = self._warned_of_deletion = False
        self._on_deleted = on_deleted

    def append(self, record: StepRecord) -> None:
        """Write a record; count it as dropped if that fails."""
        if not self._every_step and record.step % THINNED_EVERY:
            return
        line = self._writer.line(record)
        try:
            self._check_name()
            descriptor = self._open()
            if descriptor is not None:
                self._write(descriptor, line)
                self._records += 1
                return
        except OSError as error:
            self._on_error(error)
        self.dropped += 1

    def close(self) -> None:
        """Close the file; a later record would open it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int | None:
        """Return the open file; None during the delay after a disk error."""
        if self._descriptor is not None and self._bytes < self._settings.segment_bytes:
            return self._descriptor
        if self._now() < self._retry_at:
            return None
        if self._descriptor is not None:
            self.close()
            self._rotate()
            self._records = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = open_to_append(self.path)
        self._bytes = os.fstat(self._descriptor).st_size
        if self._bytes and os.pread(self._descriptor, 1, self._bytes - 1) != b"\n":
            self._write(self._descriptor, b"\n")  # after the partial line of a killed process
        return self._descriptor

    def _check_name(self) -> None:
        """Close the file if its name is no longer its own: it was deleted, or renamed."""
        if self._descriptor is None:
            return
        status = os.fstat(self._descriptor)
        self._bytes = status.st_size  # less than was written if it was truncated
        try:
            if os.path.samestat(status, os.lstat(self.path)):
                return
        except FileNotFoundError:
            # With its whole folder moved away, the file is still in the right place.
            if status.st_nlink and not self.path.parent.exists():
                return
        self.close()
        lost, self._records = self._records, 0
        if status.st_nlink:
            logger.info("the run log %s was renamed; it goes on in a new file", self.path)
            return
        self.dropped += lost
        if not self._warned_of_deletion:
            self._warned_of_deletion = True
            logger.warning(
                "the run log %s was deleted during the run: %d records are lost, and counted as "
                "dropped. It goes on in a new file; training is not affected.",
                self.path,
                lost,
            )
        self._on_deleted()

    def _write(self, descriptor: int, line: bytes) -> None:
        written = os.write(descriptor, line)
        self._bytes += written
        if written < len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")

    def _rotate(self) -> None:
        """Rename the full file to segment 1 and the others one number up; drop the oldest."""
        for age in range(self._settings.max_segments - 1, 0, -1):
            older = self.path.with_suffix(f".{age}.jsonl")
            newer = self.path.with_suffix(f".{age - 1}.jsonl") if age > 1 else self.path
            if newer.exists():
                newer.replace(older)
        if self._settings.max_segments == 1:
            self.path.unlink(missing_ok=True)

    def _on_error(self, error: OSError) -> None:
        self._retry_at = self._now() + RETRY_SECONDS
        try:
            self.close()
        except OSError:  # the descriptor is released either way
            self._descriptor = None
        if not self._warned:
            self._warned = True
            logger.warning(
                "cannot write the run log %s: %s. Records are dropped and counted until it can be "
                "written; training goes on. Set run_log.folder to a writable folder.",
                self.path,
                error,
            )


def keeps_every_step(world_size: int, local_rank: int) -> bool:
    """Whether a rank logs every step, not every tenth."""
    return world_size <= FULL_LOG_WORLD_SIZE or local_rank == 0


def write_settings(folder: Path, settings: Settings) -> None:
    """Write the settings to the run folder, readable by the owner only."""
    text = json.dumps(settings.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"
    write_or_warn(folder / "settings.json", text, mode=0o600)
