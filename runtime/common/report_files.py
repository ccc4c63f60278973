"""Creates report files that only their owner can read and that are never overwritten."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from ...metrics.atomic_file import atomic_write

logger = logging.getLogger(__name__)

# A rank adds a line that begins so to its last report on a hang when training makes progress again.
RESUMED = "training resumed"
_UTC_FORM = "%Y-%m-%d %H:%M:%S UTC"
_UTC_TEXT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC")


def create_private(path: Path) -> int:
    """Create a file that only its owner can read, and return its descriptor, open for writing.

    Raises:
        FileExistsError: The file exists.
        OSError: The file cannot be created.
    """
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def create_first_free(paths: Iterable[Path]) -> tuple[Path, int] | None:
    """Create the first of these files that does not exist, or return None if all exist.

    Raises:
        OSError: The file cannot be created.
    """
    for path in paths:
        try:
            return path, create_private(path)
        except FileExistsError:
            continue
    return None


def utc_text(unix_seconds: float) -> str:
    """Return a time as text in UTC, to the second."""
    return f"{datetime.fromtimestamp(unix_seconds, UTC):{_UTC_FORM}}"


def times_in(text: str) -> list[float]:
    """Return the times that `utc_text` has written into a text, in Unix seconds."""
    times = []
    for found in _UTC_TEXT.findall(text):
        with contextlib.suppress(ValueError):  # no date
            times.append(datetime.strptime(found, _UTC_FORM).replace(tzinfo=UTC).timestamp())
    return times


def display_path(path: Path) -> str:
    """Return a path relative to the working folder, or as it is if it lies elsewhere."""
    folder = Path.cwd()
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def write_or_warn(path: Path, text: str, *, mode: int = 0o644) -> None:
    """Replace a small file atomically. Log a warning if this fails."""
    try:
        atomic_write(path, text, mode=mode)
    except OSError as error:
        logger.warning("cannot write %s: %s", path, error)
