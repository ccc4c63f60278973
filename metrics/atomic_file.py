"""Replaces small files atomically: a reader sees the old content or the new."""

from __future__ import annotations

import os
from pathlib import Path


def atomic_write(path: Path, text: str, *, mode: int = 0o644, durable: bool = False) -> None:
    """Write a file by a rename.

    Args:
        path: The file; its folder is created if missing.
        text: The whole content.
        mode: Permissions of a new file.
        durable: Return only when it would survive a power failure.

    Raises:
        OSError: The file cannot be written; the old one is unchanged.
    """
    half = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with open(os.open(half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        half.replace(path)
    except OSError:
        half.unlink(missing_ok=True)
        raise
    if durable:
        sync(path.parent)


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
