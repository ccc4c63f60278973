"""Writes small files atomically, and appends to logs, without following symbolic links."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path


def atomic_write(path: Path, text: str, *, mode: int = 0o644, durable: bool = False) -> None:
    """Replace the content of a file by renaming a complete temporary file.

    Args:
        path: The file; its folder is created if missing.
        text: The whole content.
        mode: Permissions of a new file.
        durable: Whether to return only when the content would survive a power failure.

    Raises:
        OSError: The file cannot be written; the old one is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Exclusive: a link that another user has put there would otherwise be followed.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "w") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


def open_to_append(path: Path) -> int:
    """Open a file for appending and reading, create it if missing, and return its descriptor.

    Raises:
        OSError: It cannot be opened, or is a symbolic link or no regular file.
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
