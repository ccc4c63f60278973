"""A file of /proc or a cgroup that is read again and again."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

# /proc/self/status is about 2 KiB, but has a line that grows with the user's groups.
_READ_BYTES = 16384


class KernelFile:
    """Keeps one file open, so that reading it is a single system call.

    It is closed when nobody holds it any more, and in no other way: a late reader, or worse a late
    writer, could otherwise meet a descriptor that by then belongs to another file.
    """

    def __init__(self, path: Path, flags: int = os.O_RDONLY) -> None:
        self._descriptor = os.open(path, flags)
        # Not at exit: a daemon thread may still be reading then.
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    def read(self) -> bytes:
        """Return what the kernel says now."""
        return os.pread(self._descriptor, _READ_BYTES, 0)

    def write(self, command: bytes) -> None:
        """Give the kernel a command."""
        os.pwrite(self._descriptor, command, 0)
