"""Folder of a run's checkpoints, each of which is complete or absent.

    FOLDER/latest                    name of the checkpoint to load; DeepSpeed's tools read it too
    FOLDER/step-00000012/            a complete checkpoint, described by zerowatch.json in it
    FOLDER/.partial-step-00000013/   one being written, or what a killed process left of it

A checkpoint becomes complete by one rename, and `latest` is updated after that.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ....errors import CheckpointError
from ....metrics.atomic_file import atomic_write, sync
from .manifest import read_manifest

LATEST = "latest"
MANIFEST = "zerowatch.json"
_COMPLETE = re.compile(r"step-\d{8,}(-\d+)?")
_PARTIAL = re.compile(rf"\.partial-{_COMPLETE.pattern}")
_TEMPORARY_LATEST = re.compile(rf"\.{LATEST}\.\d+")


class CheckpointFolder:
    """Folder of checkpoints; nothing is written before the first call that writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self) -> None:
        """Create the folder, and remove what killed processes left half written or half deleted.

        Raises:
            OSError: It cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for entry in self.path.iterdir():
            if _PARTIAL.fullmatch(entry.name):
                shutil.rmtree(entry)
            elif _TEMPORARY_LATEST.fullmatch(entry.name):
                entry.unlink()

    def names(self) -> list[str]:
        """Return the names of complete checkpoints, in no order."""
        if not self.path.is_dir():
            return []
        return [entry.name for entry in self.path.iterdir() if self.is_complete(entry.name)]

    def is_complete(self, name: str) -> bool:
        """Return whether there is a complete checkpoint of that name."""
        return _COMPLETE.fullmatch(name) is not None and self.manifest(name).is_file()

    def serials(self) -> dict[str, int]:
        """Return the serial number of each complete checkpoint whose manifest can be read."""
        found = {}
        for name in self.names():
            with suppress(CheckpointError):
                found[name] = read_manifest(self.manifest(name)).serial
        return found

    def latest(self) -> str | None:
        """Return the name in `latest`; None without that file.

        Raises:
            OSError: It cannot be read.
        """
        try:
            return (self.path / LATEST).read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def manifest(self, name: str) -> Path:
        """Return the path of a checkpoint's manifest."""
        return self.path / name / MANIFEST

    def next_repeat(self, steps: int) -> int:
        """Return the next free repeat number of a step; lower ones may be free too.

        Of several checkpoints of one step the first are deleted first, so a count would not do.
        """
        first = checkpoint_name(steps, 0)
        names = [entry.name for entry in self.path.iterdir() if _COMPLETE.fullmatch(entry.name)]
        later = [
            int(name.removeprefix(f"{first}-")) for name in names if name.startswith(f"{first}-")
        ]
        return max([first in names, *later])

    def commit(self, name: str) -> None:
        """Make a partial checkpoint complete and the latest; its files must be on the disk.

        Raises:
            OSError: The disk fails; the checkpoint that was the latest still is.
        """
        (self.path / partial_name(name)).rename(self.path / name)
        sync(self.path)
        atomic_write(self.path / LATEST, name, durable=True)

    def remove(self, names: Iterable[str]) -> None:
        """Delete checkpoints; an interrupted deletion leaves none that looks complete.

        Raises:
            OSError: The disk fails.
        """
        for name in names:
            partial = self.path / partial_name(name)
            (self.path / name).rename(partial)
            shutil.rmtree(partial)


def checkpoint_name(steps: int, repeat: int) -> str:
    """Return the name of a checkpoint; `repeat` distinguishes those of the same step."""
    return f"step-{steps:08d}" + (f"-{repeat + 1}" if repeat else "")


def partial_name(name: str) -> str:
    """Return the name of a checkpoint while it is being written."""
    return f".partial-{name}"
