"""Finds the locks of torch's C++ extensions: of a build that runs, or of a build that was killed.

torch builds an extension under a lock file. Every other process that needs the extension waits
until the file is gone, without a limit and without a message. A job that is killed during a build
leaves the file behind.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_BATON = os.path.join("torch", "utils", "file_baton.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildLock:
    """A lock file of torch's extensions.

    Attributes:
        age_seconds: Time since the lock was made; None if it has just been released.
        builders: Processes of this machine that hold the lock or compile in its folder. Processes
            of other users may be missing.
    """

    path: Path
    age_seconds: float | None
    builders: tuple[int, ...] = ()

    @property
    def age(self) -> str:
        """The age in words, such as "3 h 5 min"."""
        seconds = self.age_seconds or 0.0
        hours, minutes = int(seconds // 3600), int(seconds % 3600 // 60)
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {int(seconds % 60)} s"


def extensions_root() -> Path:
    """Return the folder in which torch builds extensions."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) if root else Path(cache) / "torch_extensions"


def build_locks(root: Path) -> list[BuildLock]:
    """Return the locks below a folder of extensions, by path."""
    # The folder of an extension is below the root, or below a folder per Python and CUDA version.
    return [lock_at(path) for path in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")])]


def awaited_lock() -> Path | None:
    """Return the lock file that a thread of this process waits for, or None."""
    for frame in sys._current_frames().values():
        code = frame.f_code
        if code.co_name == "wait" and code.co_filename.endswith(_BATON):
            return Path(frame.f_locals["self"].lock_file_path)
    return None


def lock_at(path: Path) -> BuildLock:
    """Return the state of a lock file."""
    try:
        age_seconds = max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return BuildLock(path=path, age_seconds=None)
    return BuildLock(path=path, age_seconds=age_seconds, builders=tuple(_builders(path)))


def _builders(path: Path) -> Iterator[int]:
    """Yield the processes that hold a lock open, and those that compile in its folder.

    The process that makes a lock keeps it open until the end of the build.
    """
    folder = path.parent.resolve()
    for process in psutil.process_iter(["cwd", "open_files"]):
        if process.pid == os.getpid():
            continue
        opened = process.info["open_files"] or ()
        if process.info["cwd"] == str(folder) or any(
            each.path == str(folder / path.name) for each in opened
        ):
            yield process.pid
