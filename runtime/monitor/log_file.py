"""Appends lines to a log that consists of segments. A disk error never raises an exception."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...metrics.atomic_file import open_log
from ...metrics.settings import RunLogSettings

logger = logging.getLogger(__name__)

# Delay between a disk error and the next attempt to write, of all files of the run folder.
RETRY_SECONDS = 10.0


class LogFile:
    """Appends lines to `<name>.jsonl`; older segments are `<name>.1.jsonl` and so on.

    Lines are written as a whole, so a killed process loses at most those of the write in flight. If
    the file is deleted or renamed, the log continues in a new file with the original name.

    Attributes:
        path: The current segment.
        dropped: Number of lines that could not be written, or whose file was deleted.
    """

    def __init__(
        self,
        path: Path,
        settings: RunLogSettings,
        *,
        on_deleted: Callable[[], None] = lambda: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the log. The first line opens the file.

        Args:
            path: The current segment, in the run folder.
            settings: The size and number of segments.
            on_deleted: Called after somebody has deleted the file. The folder may be gone as well.
            now: A monotonic clock, in seconds.
        """
        self.path = path
        self.dropped = 0
        self._settings = settings
        self._now = now
        self._descriptor: int | None = None
        self._bytes = self._lines = 0  # the file's size; lines of this process in the file
        self._is_first = True
        self._retry_at = 0.0
        self._warned = self._warned_of_deletion = False
        self._on_deleted = on_deleted

    def append(self, line: Callable[[bool], bytes]) -> None:
        """Write a line. If writing fails, count the line as dropped.

        Args:
            line: Returns the line including the newline. Its argument is whether the line is the
                first since the file was opened or truncated. It is not called while the file
                cannot be opened.
        """
        try:
            self._check_name()
            descriptor = self._open()
            if descriptor is not None:
                self._bytes += write_whole(descriptor, line(self._is_first))
                self._lines += 1
                self._is_first = False
                return
        except OSError as error:
            self._on_error(error)
        self.dropped += 1

    def append_all(self, lines: Sequence[bytes]) -> None:
        """Write lines, each with its newline, by as few writes as segments allow.

        The lines that could not be written are counted as dropped, those before them are not.
        """
        num_done = 0
        try:
            self._check_name()
            while num_done < len(lines) and (descriptor := self._open()) is not None:
                some = self._lines_of_segment(lines[num_done:])
                num_written, error = _write_lines(descriptor, some)
                num_done += num_written
                self._lines += num_written
                self._bytes += sum(map(len, some[:num_written]))
                self._is_first &= not num_written
                if error is not None:
                    raise error
        except OSError as error:
            self._on_error(error)
        self.dropped += len(lines) - num_done

    def _lines_of_segment(self, lines: Sequence[bytes]) -> Sequence[bytes]:
        """Return the first of the lines: as many as the segment takes until it is full."""
        num_bytes = self._bytes
        for number, line in enumerate(lines):
            if number and num_bytes >= self._settings.segment_bytes:
                return lines[:number]
            num_bytes += len(line)
        return lines

    def close(self) -> None:
        """Close the file. A later line would open it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int | None:
        """Return the descriptor of the open file, or None during the delay after a disk error."""
        if self._descriptor is not None and self._bytes < self._settings.segment_bytes:
            return self._descriptor
        if self._now() < self._retry_at:
            return None
        if self._descriptor is not None:
            self.close()
            self._rotate()
            self._lines = 0
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor, self._is_first = open_log(self.path), True
        self._bytes = os.fstat(self._descriptor).st_size
        return self._descriptor

    def _check_name(self) -> None:
        """Close the file if somebody has deleted or renamed it."""
        if self._descriptor is None:
            return
        status = os.fstat(self._descriptor)
        self._is_first |= status.st_size < self._bytes  # somebody has truncated the file
        self._bytes = status.st_size
        try:
            if os.path.samestat(status, os.lstat(self.path)):
                return
        except FileNotFoundError:
            # If the whole folder was moved, the file is still in the right place.
            if status.st_nlink and not self.path.parent.exists():
                return
        self.close()
        lost, self._lines = self._lines, 0
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

    def _rotate(self) -> None:
        """Rename the full file to segment 1, renumber older segments, and delete the oldest."""
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
        except OSError:  # the descriptor is released even if closing fails
            self._descriptor = None
        if not self._warned:
            self._warned = True
            logger.warning(
                "cannot write the run log %s: %s. Records are dropped and counted until it can be "
                "written; training goes on. Set run_log.folder to a writable folder.",
                self.path,
                error,
            )


def _write_lines(descriptor: int, lines: Sequence[bytes]) -> tuple[int, OSError | None]:
    """Write lines by one call; return how many were written as a whole, and the error if any."""
    num_bytes = sum(map(len, lines))
    try:
        written = os.write(descriptor, b"".join(lines))
    except OSError as error:
        return 0, error
    if written == num_bytes:
        return len(lines), None
    ends = itertools.accumulate(map(len, lines))
    return sum(end <= written for end in ends), _partial(written, num_bytes)


def write_whole(descriptor: int, data: bytes) -> int:
    """Write bytes at the end of a log by one call, and return their number.

    Raises:
        OSError: Not all of them could be written.
    """
    written = os.write(descriptor, data)
    if written < len(data):
        raise _partial(written, len(data))
    return written


def _partial(written: int, num_bytes: int) -> OSError:
    return OSError(f"only {written} of {num_bytes} bytes were written, as on a full disk")
