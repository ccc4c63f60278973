"""Asks whether another process has locked a file, without taking the lock."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

# Rank 0 makes this file when it begins a run folder, and locks it while the run is live.
LOCK_FILE = "run.lock"

_FLOCK = "hhqqi"  # struct flock of fcntl(2)


def is_locked_by_another(file: Path) -> bool:
    """Return whether another process of this host, or of the same file system, has locked a file.

    False if the file cannot be opened, or is on a network file system without locks. A process must
    not ask about its own locks: to close the file releases them.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        question = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, question)
        return bool(struct.unpack(_FLOCK, answer)[0] != fcntl.F_UNLCK)
    except OSError:
        return False
    finally:
        os.close(descriptor)
