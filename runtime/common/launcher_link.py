"""Connects `zerowatch run` with local rank 0, which names its run folder to the launcher.

The launcher cannot compute the folder: the script's call and ds config may set run_log.folder, a
number is appended to the id of a run if another live run has it, and on several nodes rank 0 makes
the id.
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


def send_run_folder(folder: Path, *, rank: int) -> None:
    """Name the run folder to the launcher, if there is one; only local rank 0 calls this.

    Args:
        folder: The run folder.
        rank: The global rank of this process.
    """
    path = _file()
    if path is not None:
        with contextlib.suppress(OSError):  # the launcher has ended, or the disk is full
            folders = _folders(path)
            # A restart may give rank 0 to another node.
            had_rank_0 = folders.pop(str(folder), False)
            folders[str(folder)] = had_rank_0 or rank == 0
            atomic_write(path, json.dumps(folders))


def _file() -> Path | None:
    """Return the launcher's file; None in a job that a rank starts, which inherits the variable."""
    process, _, path = os.environ.get(_VARIABLE, "").partition(" ")
    is_ours = process in (str(os.getppid()), str(os.getpid()))
    return Path(path) if is_ours and path else None


def _folders(path: Path) -> dict[str, bool]:
    """Return the folders in the launcher's file, and whether rank 0 named them.

    Empty if the file cannot be read.
    """
    try:
        folders: dict[str, bool] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return folders


class RunFolderReceiver:
    """Receives the run folders from local rank 0.

    Args:
        path: The file in which local rank 0 names them.
        runs: The folder of run folders by the settings of this process.
    """

    def __init__(self, path: Path, runs: Path) -> None:
        self._path, self._runs = path, runs.absolute()

    def folders(self) -> list[Path]:
        """Return a folder for each training of the script, the last one last.

        Empty if rank 0 is on another node: its launcher prints the end of the run.
        """
        return [Path(folder) for folder, has_rank_0 in _folders(self._path).items() if has_rank_0]

    def runs(self) -> list[Path]:
        """Return the folders of run folders of this node's ranks, the latest named one first.

        Until a rank has named its run folder, that by the settings of this process is known.
        """
        named = [folder.parent for folder in self.named()]
        return list(dict.fromkeys([*named, self._runs]))

    def named(self) -> list[Path]:
        """Return the run folders that ranks of this node have named, the latest one first."""
        return [Path(folder) for folder in reversed(_folders(self._path))]


@contextlib.contextmanager
def receive_run_folder(runs: Path) -> Iterator[RunFolderReceiver]:
    """Let the ranks that this process starts name their run folder while the context is open.

    Args:
        runs: The folder of run folders by the settings of this process.
    """
    with tempfile.TemporaryDirectory(prefix="zerowatch-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / "run_folder"
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = f"{os.getpid()} {path}"
        try:
            yield RunFolderReceiver(path, runs)
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before
