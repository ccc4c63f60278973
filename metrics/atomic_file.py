"""Writes small files atomically, and opens logs and other files safely.

Nothing here follows a symbolic link to write, or waits for the other end of a FIFO.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
import time
from pathlib import Path

_BLOCK_BYTES = 65536
# Longer than another process takes to write a line, a part of which can be seen meanwhile.
_IN_FLIGHT_SECONDS = 0.02


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


def mend_last_line(descriptor: int) -> None:
    r"""Make a log of JSON lines one to which a line can be appended, if its end is a partial line.

    A killed process or a full disk leaves one. Its bytes become spaces, which JSON allows before a
    value, so that each line can be parsed once the next one is appended. If only the end of the
    line was missing, it is written. Nothing is cut off, because another process may append. If the
    file still changes, that process is writing the line.

        os.write(descriptor, b'{"step": 1}\n{"step": 2, "lo')
        mend_last_line(descriptor)  # b'{"step": 1}\n               '

    Args:
        descriptor: The file, from `open_to_append`.

    Raises:
        OSError: The file cannot be read or written.
    """
    last, size = _last_line(descriptor)
    while last.strip():
        time.sleep(_IN_FLIGHT_SECONDS)
        before = last, size
        last, size = _last_line(descriptor)
        if (last, size) == before:
            _mend(descriptor, last, size)
            return


def open_log(path: Path) -> int:
    """Open a log for appending, mend the partial line of a killed process, return the descriptor.

    Raises:
        OSError: The log cannot be opened, or the partial line cannot be mended.
    """
    descriptor = open_to_append(path)
    try:
        mend_last_line(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _mend(descriptor: int, last: bytes, size: int) -> None:
    try:
        json.loads(last)
    except ValueError:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        # On Linux, os.pwrite appends to a file that was opened to append.
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_APPEND)
        try:
            os.pwrite(descriptor, b" " * len(last), size - len(last))
        finally:
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    else:
        os.write(descriptor, b"\n")


def _last_line(descriptor: int) -> tuple[bytes, int]:
    """Return the bytes after the last end of a line, and the size of the file."""
    start = size = os.fstat(descriptor).st_size
    last = b""
    while start and b"\n" not in last:
        block_size = min(start, _BLOCK_BYTES)
        start -= block_size
        last = os.pread(descriptor, block_size, start) + last
    return last[last.rfind(b"\n") + 1 :], size


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
