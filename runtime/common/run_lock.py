"""Locks a run folder while its run is live, and finds out whether one is locked.

The lock is POSIX's, which forked children do not inherit: they may live longer than the run. It is
lost if its process opens and closes the file once more, as `shutil.copytree` of the folder does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from ...metrics.file_lock import LOCK_FILE, is_locked_by_another

# Device and inode of each locked file, and the id of the process, by the file's descriptor.
_locked: dict[int, tuple[int, int, int]] = {}


def lock(descriptor: int) -> bool:
    """Lock an open file, or take its lock again in case it was lost.

    Returns:
        False if another process has locked the file. True, too, where locks are not possible: some
        network file systems do not support them, and some policies forbid them (EACCES).
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            return False
    with contextlib.suppress(OSError):  # a stale file of a network file system
        _locked[descriptor] = _key(os.fstat(descriptor))
    return True


def unlock(descriptor: int) -> None:
    """Close a file that `lock` has locked."""
    _locked.pop(descriptor, None)
    os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether rank 0 of a live run on this host, or on the same file system, holds the folder."""
    try:
        if _key(os.stat(folder / LOCK_FILE)) in _locked.values():
            return True
    except OSError:
        return False
    return is_locked_by_another(folder / LOCK_FILE)


def _key(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_dev, status.st_ino, os.getpid()
