"""Small files that a reader finds whole: the old one, or the new."""

from __future__ import annotations

import os
from pathlib import Path


def atomic_write(path: Path, text: str, *, mode: int = 0o644, durable: bool = False) -> None:
    """Put a file in place in one move.

    Args:
        path: The file; its folder is made where there is none.
        text: All of it.
        mode: Who may read and write it, where there is none yet.
        durable: Return only when it would also stand after a power cut.

    Raises:
        OSError: The disk refuses; the old one stands.
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
    """Wait until a file's content, or a folder's names, are on the disk.

    Raises:
        OSError: The disk refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
