"""The folder of a run's saves, in which each is there whole or not at all.

    FOLDER/latest                    names the save to load; DeepSpeed's own tools read it too
    FOLDER/step-00000012/            a whole save; zerowatch.json in it says what it holds
    FOLDER/.partial-step-00000013/   one being written, or what a killed process left of it

A save becomes whole by one rename, and `latest` moves after that. It knows no ranks.
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
_WHOLE = re.compile(r"step-\d{8,}(-\d+)?")
_PARTIAL = re.compile(rf"\.partial-{_WHOLE.pattern}")
_HALF_LATEST = re.compile(rf"\.{LATEST}\.\d+")


class SaveFolder:
    """The folder; nothing is touched before the first call that says so."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def prepare(self) -> None:
        """Make the folder, and remove what killed processes left half written or half deleted.

        Raises:
            OSError: It cannot be written.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for entry in self.path.iterdir():
            if _PARTIAL.fullmatch(entry.name):
                shutil.rmtree(entry)
            elif _HALF_LATEST.fullmatch(entry.name):
                entry.unlink()

    def saves(self) -> list[str]:
        """Return the names of whole saves, in no order."""
        if not self.path.is_dir():
            return []
        return [entry.name for entry in self.path.iterdir() if self.is_whole(entry.name)]

    def is_whole(self, name: str) -> bool:
        """Whether there is a save of that name, all of it."""
        return _WHOLE.fullmatch(name) is not None and self.manifest(name).is_file()

    def save_numbers(self) -> dict[str, int]:
        """Return the serial number of each whole save; one that cannot be read is left out."""
        found = {}
        for name in self.saves():
            with suppress(CheckpointError):
                found[name] = read_manifest(self.manifest(name)).serial
        return found

    def latest(self) -> str | None:
        """Return what `latest` says; None where there is none.

        Raises:
            OSError: It cannot be read.
        """
        try:
            return (self.path / LATEST).read_text().strip()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def manifest(self, name: str) -> Path:
        """Return where a save says what it holds."""
        return self.path / name / MANIFEST

    def is_duplicate(self, steps: int) -> int:
        """Return the first number from which on no save of that step has one; earlier may be free.

        Of several saves of one step the first are deleted first, so that a count would not do.
        """
        first = save_name(steps, 0)
        names = [entry.name for entry in self.path.iterdir() if _WHOLE.fullmatch(entry.name)]
        later = [
            int(name.removeprefix(f"{first}-")) for name in names if name.startswith(f"{first}-")
        ]
        return max([first in names, *later])

    def commit(self, name: str) -> None:
        """Make a partial save whole and the latest; its files must be on the disk.

        Raises:
            OSError: The disk refuses; the save that was the latest still is.
        """
        (self.path / partial_name(name)).rename(self.path / name)
        sync(self.path)
        atomic_write(self.path / LATEST, name, durable=True)

    def remove(self, names: Iterable[str]) -> None:
        """Delete saves; one that is interrupted leaves nothing that looks whole.

        Raises:
            OSError: The disk refuses.
        """
        for name in names:
            half = self.path / partial_name(name)
            (self.path / name).rename(half)
            shutil.rmtree(half)


def save_name(steps: int, repeat: int) -> str:
    """Name a save by its step; `repeat` tells saves of the same step apart."""
    return f"step-{steps:08d}" + (f"-{repeat + 1}" if repeat else "")


def partial_name(name: str) -> str:
    """Name a save while it is being written."""
    return f".partial-{name}"
