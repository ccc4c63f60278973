"""Connects `zerowatch run` with rank 0, which names its run folder to the launcher.

The launcher cannot compute the folder: a number is appended to the id of a run if another live run
has it, and on several nodes rank 0 makes the id.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...metrics.atomic_file import atomic_write

# Not ZEROWATCH_..., whose names are settings. The process of the launcher, and the file.
_VARIABLE = "_ZEROWATCH_RUN_FOLDER_FILE"


def has_launcher() -> bool:
    """Whether `zerowatch run` started this process and prints the end of the run."""
    return _file() is not None


def send_run_folder(folder: Path) -> None:
    """Name the run folder to the launcher, if there is one; only rank 0 calls this."""
    path = _file()
    if path is not None:
        with contextlib.suppress(OSError):  # the launcher has ended, or the disk is full
            others = [str(each) for each in _folders(path) if each != folder]
            atomic_write(path, json.dumps([*others, str(folder)]))


def _file() -> Path | None:
    """Return the launcher's file; None in a job that a rank starts, which inherits the variable."""
    process, _, path = os.environ.get(_VARIABLE, "").partition(" ")
    is_ours = process in (str(os.getppid()), str(os.getpid()))
    return Path(path) if is_ours and path else None


def _folders(path: Path) -> list[Path]:
    """Return the folders in the launcher's file; none if it cannot be read."""
    try:
        return [Path(folder) for folder in json.loads(path.read_text("utf-8"))]
    except (OSError, ValueError):
        return []


class RunFolderReceiver:
    """Receives the run folders from rank 0, if rank 0 is on this node."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def folders(self) -> list[Path]:
        """Return a folder for each training of the script, the last one last."""
        return _folders(self._path)


@contextlib.contextmanager
def receive_run_folder() -> Iterator[RunFolderReceiver]:
    """Let the ranks that this process starts name their run folder while the context is open."""
    with tempfile.TemporaryDirectory(prefix="zerowatch-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "run_folder"
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = f"{os.getpid()} {path}"
        try:
            yield RunFolderReceiver(path)
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before
