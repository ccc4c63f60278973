"""Distinguishes this user's files from those of others, in a folder that several users share."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

# Liveness files and exit notes have a few hundred bytes.
MAX_BYTES = 64 * 1024


def is_own(status: os.stat_result, folder: Path) -> bool:
    """Return whether a file or folder belongs to this user.

    Args:
        status: Its status.
        folder: The folder itself, or that of the file. Some file systems map user ids, as NFS does
            for root. A file that is made there then has the id that this user's files have.
    """
    if status.st_uid == os.geteuid():
        return True
    try:
        with tempfile.TemporaryFile(dir=folder) as made:
            return status.st_uid == os.fstat(made.fileno()).st_uid
    except OSError:
        return False


def is_foreign_folder(folder: Path) -> bool:
    """Return whether a folder is another user's, or one in which this user may not write.

    False if there is no such folder.
    """
    try:
        is_usable = is_own(folder.stat(), folder) and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False
    return not is_usable


def read_own_file(path: Path) -> bytes:
    """Return the content of a small file of this user, without waiting for a FIFO's writer.

    Raises:
        OSError: The file cannot be read, is a symbolic link, is not a regular file, belongs to
            another user, or has more than MAX_BYTES.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        if not is_own(status, path.parent):
            raise PermissionError(errno.EACCES, "it belongs to another user", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(MAX_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > MAX_BYTES:
        raise OSError(errno.EFBIG, f"it has more than {MAX_BYTES} bytes", str(path))
    return content
