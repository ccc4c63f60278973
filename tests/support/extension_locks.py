"""Finds locks of killed jobs in torch's folder of built extensions, which block every job."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

# A holder that has made its lock starts its compiler, which works in the same folder, by then.
STARTING_SECONDS = 60.0


def extensions_root() -> Path:
    """Return where torch builds extensions."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(cache) / "torch_extensions")


def stale_locks(root: Path) -> list[Path]:
    """Return the locks under `root` in whose folder nobody compiles any more."""
    old = [lock for lock in root.rglob("lock") if _age_seconds(lock) > STARTING_SECONDS]
    busy = set(_working_folders()) if old else set()
    return [lock for lock in old if str(lock.parent.resolve()) not in busy]


def complaint(locks: list[Path]) -> str:
    """Return what to do about stale locks."""
    paths = " ".join(map(str, locks))
    return f"a killed job has left a lock for which every job waits forever: rm {paths}"


def _age_seconds(file: Path) -> float:
    try:
        return time.time() - file.stat().st_mtime
    except FileNotFoundError:  # released just now
        return 0.0


def _working_folders() -> Iterator[str]:
    for process in psutil.process_iter(["cwd"]):
        if process.info["cwd"]:
            yield process.info["cwd"]
