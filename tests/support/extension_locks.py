"""Finds locks of killed jobs in torch's folder of built extensions, which block every job."""

from __future__ import annotations

from pathlib import Path

from zerowatch.runtime.common.extension_locks import build_locks

# A holder that has made its lock starts its compiler, which works in the same folder, by then.
STARTING_SECONDS = 60.0


def stale_locks(root: Path) -> list[Path]:
    """Return the locks under `root` in whose folder nobody compiles any more."""
    return [
        lock.path
        for lock in build_locks(root)
        if not lock.builders and (lock.age_seconds or 0.0) > STARTING_SECONDS
    ]


def complaint(locks: list[Path]) -> str:
    """Return what to do about stale locks."""
    paths = " ".join(map(str, locks))
    return f"a killed job has left a lock for which every job waits forever: rm {paths}"
