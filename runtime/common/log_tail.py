"""Reads the end of a log."""

from __future__ import annotations

import os
from pathlib import Path


def last_lines(path: Path, num_bytes: int) -> tuple[list[bytes], bool]:
    """Return the lines in the last bytes of a file, and whether they are the whole file.

    A line whose beginning lies before these bytes is left out.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - num_bytes))
        lines = file.read().splitlines()
    return (lines[1:], False) if size > num_bytes else (lines, True)
