"""Writes small files atomically, and opens logs and other files safely.

Nothing here follows a symbolic link to write, or waits for the other end of a FIFO.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path


def atomic_write(path: Path, text: str, *, mode: int = 0o644, durable: bool = False) -> None:
    """Replace the content of a file by renaming a complete temporary file.

    Args:
        path: The file. Its folder is created if missing.
        text: The complete new content.
        mode: The permissions of a new file.
        durable: Whether to return only after the content would survive a power failure.

    Raises:
        OSError: The file cannot be written. The old file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # O_EXCL, because a link that another user has created under this name would be followed.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        # A path may have bytes that are not UTF-8; they are written as they are.
        with open(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # errors of an open file do not name it
        raise
    if durable:
        sync(path.parent)


def open_to_append(path: Path) -> int:
    """Open a file for appending and reading, create it if missing, and return its descriptor.

    Raises:
        OSError: The file cannot be opened, is a symbolic link, or is not a regular file.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP and path.is_symlink():
            raise OSError(errno.ELOOP, "it is a symbolic link; remove it", str(path)) from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "it is no regular file; remove it", str(path))


def regular_file_status(path: Path) -> os.stat_result:
    """Return the status of a file. Call this before reading: a FIFO would wait for a writer.

    Raises:
        OSError: There is no such file, or it is not a regular file.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return status


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's entries, to disk.

    Raises:
        OSError: The flush failed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
