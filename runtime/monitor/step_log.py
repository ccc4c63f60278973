"""The run log on disk: one line per step, one write per line, and a disk that may fail."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ...metrics.settings import RunLogSettings, Settings
from ...metrics.step_record import LineWriter, StepRecord
from ..common.report_files import write_or_warn

logger = logging.getLogger(__name__)

RETRY_SECONDS = 10.0
FULL_LOG_WORLD_SIZE = 64
THINNED_EVERY = 10


class StepLog:
    """Appends step records to `rank-<r>.jsonl`. Never raises for a disk's sake.

    Each line is handed to the kernel in one write, so that a killed process loses at most the step
    in flight. Above FULL_LOG_WORLD_SIZE ranks only one rank a node writes every step.

    Attributes:
        dropped: Records that could not be written.
    """

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, str | int],
        settings: RunLogSettings,
        *,
        every_step: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the log; the file is opened by the first record.

        Args:
            folder: The run folder.
            identity: Fields that stand in every record; `rank` names the file.
            settings: Where to cut segments and how many to keep.
            every_step: Whether to keep every step or every tenth.
            now: A clock that does not go back, in seconds.
        """
        self.path = folder / f"rank-{identity['rank']}.jsonl"
        self.dropped = 0
        self._writer = LineWriter(identity)
        self._settings = settings
        self._every_step = every_step
        self._now = now
        self._descriptor: int | None = None
        self._bytes = 0
        self._retry_at = 0.0
        self._warned = False

    def append(self, record: StepRecord) -> None:
        """Write one record; count it as dropped if the disk refuses."""
        if not self._every_step and record.step % THINNED_EVERY:
            return
        line = self._writer.line(record)
        try:
            descriptor = self._open()
            if descriptor is not None:
                self._write(descriptor, line)
                return
        except OSError as error:
            self._give_up(error)
        self.dropped += 1

    def close(self) -> None:
        """Close the file; a later record would open it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int | None:
        """Return the open file, or None while waiting to try a failed disk again."""
        if self._descriptor is not None and self._bytes < self._settings.segment_bytes:
            return self._descriptor
        if self._now() < self._retry_at:
            return None
        if self._descriptor is not None:
            self.close()
            self._rotate()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        self._bytes = os.fstat(self._descriptor).st_size
        if self._bytes and os.pread(self._descriptor, 1, self._bytes - 1) != b"\n":
            self._write(self._descriptor, b"\n")  # after the half line of a killed writer
        return self._descriptor

    def _write(self, descriptor: int, line: bytes) -> None:
        written = os.write(descriptor, line)
        self._bytes += written
        if written < len(line):
            raise OSError(f"only {written} of {len(line)} bytes fitted")

    def _rotate(self) -> None:
        """Put the full file aside as segment 1, the older ones one further, and drop the oldest."""
        for age in range(self._settings.segments - 1, 0, -1):
            older = self.path.with_suffix(f".{age}.jsonl")
            newer = self.path.with_suffix(f".{age - 1}.jsonl") if age > 1 else self.path
            if newer.exists():
                newer.replace(older)
        if self._settings.segments == 1:
            self.path.unlink(missing_ok=True)

    def _give_up(self, error: OSError) -> None:
        self._retry_at = self._now() + RETRY_SECONDS
        try:
            self.close()
        except OSError:  # the file is gone either way
            self._descriptor = None
        if not self._warned:
            self._warned = True
            logger.warning(
                "cannot write the run log %s: %s. Set run_log.folder to a folder that can be "
                "written. Training goes on; records are dropped and counted until then.",
                self.path,
                error,
            )


def keeps_every_step(world_size: int, local_rank: int) -> bool:
    """Whether a rank's log is to hold every step, or every tenth."""
    return world_size <= FULL_LOG_WORLD_SIZE or local_rank == 0


def write_settings(folder: Path, settings: Settings) -> None:
    """Write the settings of the run beside its logs, readable by the owner alone."""
    text = json.dumps(settings.model_dump(mode="json"), indent=2, sort_keys=True) + "\n"
    write_or_warn(folder / "settings.json", text, mode=0o600)
